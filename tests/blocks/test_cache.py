"""Chunks in memory: bounded in bytes, read once, and read ahead."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from penstock.blocks import BlockManager, ingest
from penstock.blocks.cache import ChunkCache
from penstock.errors import ConfigError, CorruptBlockError


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    rows = [{"text": f"{number:03d} " + "x" * 96} for number in range(50)]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    ingest(tmp_path / "rows.jsonl", tmp_path / "store", 20)
    return tmp_path / "store"


def test_the_budget_in_bytes_is_never_passed_and_the_oldest_go_first() -> None:
    cache = ChunkCache(100)
    reads: list[int] = []

    def chunk(number: int) -> bytes:
        reads.append(number)
        return bytes(40)

    for number in (1, 2, 1, 3, 1, 2):
        cache.get(number, lambda number=number: chunk(number))
        assert cache.size_bytes <= 100
    assert reads == [1, 2, 3, 2]


def test_what_is_larger_than_the_budget_is_read_and_not_kept() -> None:
    cache = ChunkCache(10)
    assert len(cache.get("large", lambda: bytes(11))) == 11
    assert cache.size_bytes == 0


def test_several_threads_that_want_one_chunk_read_it_once() -> None:
    cache = ChunkCache(1000)
    go = threading.Event()
    reads: list[int] = []

    def slow() -> bytes:
        reads.append(1)
        go.wait(5)
        return b"chunk"

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(cache.get, "key", slow) for _ in range(8)]
        go.set()
        assert {future.result() for future in futures} == {b"chunk"}
    assert reads == [1]


def test_an_error_reaches_whoever_asked_and_the_next_one_reads_again() -> None:
    cache = ChunkCache(1000)

    def broken() -> bytes:
        raise CorruptBlockError("bad bytes")

    cache.prefetch("key", broken)
    for _ in range(2):
        with pytest.raises(CorruptBlockError, match="bad bytes"):
            cache.get("key", broken)
    assert cache.get("key", lambda: b"mended") == b"mended"


def test_the_chunk_behind_is_read_ahead_over_the_end_of_a_block(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=10)
    manager.get_chunk(0, 0)
    manager.get_chunk(0, 1)
    manager.close()  # waits for what is on its way
    with BlockManager(dest, dataset_chunk_size=10) as again:
        assert again.get_chunk(0, 1)[0].startswith("010")
        assert again.get_chunk(1, 0)[0].startswith("020")
        (dest / "blocks" / "block_00001.jsonl").unlink()
        assert again.get_chunk(1, 0)[0].startswith("020"), "the chunk was not kept"


def test_chunk_sizes_do_not_mix_in_memory(dest: Path) -> None:
    with BlockManager(dest) as manager:
        assert [len(manager.get_chunk(0, 0, size)) for size in (5, 10, 5, 20)] == [5, 10, 5, 20]
        assert manager.get_chunk(0, 1, 5)[0].startswith("005")
        assert manager.get_chunk(0, 1, 10)[0].startswith("010")


def test_a_manager_with_chunks_in_memory_pickles_without_them(dest: Path) -> None:
    manager = BlockManager(dest, dataset_chunk_size=10, cache_bytes=12345, prefetch=False)
    expected = manager.get_chunk(2, 0)
    copy = pickle.loads(pickle.dumps(manager))  # noqa: S301 - our own bytes
    assert (copy.cache_bytes, copy.prefetch, copy.dataset_chunk_size) == (12345, False, 10)
    assert copy.get_chunk(2, 0) == expected


def test_a_cache_of_negative_size_is_refused(dest: Path) -> None:
    with pytest.raises(ConfigError, match="cache_bytes=-1"):
        BlockManager(dest, cache_bytes=-1)

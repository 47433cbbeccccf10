"""Reading a block store behind a network: one request a chunk, none from the disk cache, never what is stale."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from blocks.data import all_rows, damages, numbered, write_jsonl
from blocks.remote_stores import files
from equipment.buckets import use_key
from equipment.processes import held_open, python, run
from equipment.proxy import Proxy, faulty_proxy
from equipment.servers import S3Server
from equipment.web import web_server
from penstock.blocks import BlockManager, BlockStore, ingest, remote
from penstock.errors import BlockStoreError, ConfigError, CorruptBlockError, StorageError
from penstock.storage import open_storage

ROWS = numbered(50)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; where the disk cache is in it."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "objects"


@pytest.fixture
def store(tmp_path: Path, bucket: str) -> str:
    """A block store of three blocks."""
    ingest(write_jsonl(tmp_path / "rows.jsonl", ROWS), bucket, 20)
    return bucket


@pytest.fixture
def proxy(store: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What counts the requests, and makes no trouble by itself."""
    with faulty_proxy(s3.url) as proxy:
        use_key(monkeypatch, "tester", proxy.url)
        yield proxy


def asked(proxy: Proxy, begin: int = 0) -> list[str]:
    """Requests for blocks and indexes, as ``GET block_00000.jsonl``."""
    told = (f"{method} {path.rpartition('/')[2]}" for method, path, _ in proxy.requests[begin:])
    return [request for request in told if "block_0" in request]


def test_a_chunk_is_one_request_once_the_index_is_known(store: str, proxy: Proxy) -> None:
    manager = BlockManager(store, dataset_chunk_size=5, disk_cache_bytes=0, prefetch=False, cache_bytes=0)
    for chunk in range(4):
        assert manager.get_rows(1, chunk) == ROWS[20 + 5 * chunk : 25 + 5 * chunk]
    assert asked(proxy) == ["GET block_00001.idx", *["GET block_00001.jsonl"] * 4]
    ranges = [headers["range"] for _, path, headers in proxy.requests if path.endswith("1.jsonl")]
    assert len(set(ranges)) == 4, "each asks for its own bytes alone"


def test_what_was_read_before_is_on_this_disk(store: str, proxy: Proxy, cache: Path) -> None:
    assert all_rows(store) == ROWS
    files = [f"block_0000{number}.{kind}" for number in range(3) for kind in ("idx", "jsonl")]
    assert sorted(set(asked(proxy))) == sorted(f"{method} {file}" for file in files for method in ("GET", "HEAD"))
    assert len(list(cache.glob("??/*.piece"))) == 6
    before = len(proxy.requests)
    assert all_rows(store) == ROWS
    assert sorted(asked(proxy, before)) == sorted(f"HEAD {file}" for file in files), "only the versions are asked for"


def test_turned_off_it_keeps_nothing(store: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockManager(store, disk_cache_bytes=0).get_rows(0, 0) == ROWS[:20]
    monkeypatch.setenv("PENSTOCK_DISK_CACHE_BYTES", "0")
    assert BlockManager(store).get_rows(0, 0) == ROWS[:20]
    assert not cache.exists()
    monkeypatch.setenv("PENSTOCK_DISK_CACHE_BYTES", "plenty")
    with pytest.raises(ConfigError, match="PENSTOCK_DISK_CACHE_BYTES='plenty' is no size: expected a number of bytes"):
        BlockManager(store).get_rows(0, 0)
    with pytest.raises(ConfigError, match="disk_cache_bytes=-1"):
        BlockManager(store, disk_cache_bytes=-1)


def test_a_local_store_has_no_disk_cache(tmp_path: Path, cache: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "out", 20)
    assert all_rows(tmp_path / "out") == ROWS
    assert not cache.exists()


def test_a_store_made_anew_at_the_same_place_is_not_served_from_the_cache(tmp_path: Path, store: str) -> None:
    assert all_rows(store) == ROWS
    storage = open_storage(store)
    for info in list(storage.list()):
        storage.delete(info.key)
    others = [{**row, "text": row["text"].upper()} for row in ROWS]  # of the same sizes
    ingest(write_jsonl(tmp_path / "others.jsonl", others), store, 20)
    assert all_rows(store) == others


def test_damage_is_found_though_sound_pieces_of_before_are_in_the_cache(store: str) -> None:
    assert all_rows(store) == ROWS
    storage = open_storage(store)
    for block, key, damage, told in [
        (1, "blocks/block_00001.jsonl", lambda data: data.replace(b"sample 25", b"sample 99"), "are not what was"),
        (2, "blocks/block_00002.jsonl", lambda data: data[:-1], "expected"),
        (0, "blocks/block_00000.idx", lambda data: data[:-12], "block_00000.idx has"),
    ]:
        storage.put(key, damage(storage.get(key)))
        with pytest.raises(CorruptBlockError, match=told):
            BlockManager(store, dataset_chunk_size=20).get_rows(block, 0)


def test_a_block_written_again_with_the_same_bytes_is_no_matter(store: str) -> None:
    manager = BlockManager(store, dataset_chunk_size=5, prefetch=False, cache_bytes=0, disk_cache_bytes=0)
    cached = BlockManager(store, dataset_chunk_size=5, prefetch=False, cache_bytes=0)
    for reader in (manager, cached):
        assert reader.get_rows(0, 0) == ROWS[:5]
    storage = open_storage(store)
    storage.put("blocks/block_00000.jsonl", storage.get("blocks/block_00000.jsonl"))
    for reader in (manager, cached):
        assert reader.get_rows(0, 3) == ROWS[15:20]


def test_a_missing_block_and_a_missing_store_are_named(store: str) -> None:
    open_storage(store).delete("blocks/block_00001.jsonl")
    with pytest.raises(CorruptBlockError, match=r"block_00001.jsonl is missing.*inspect"):
        BlockManager(store).get_rows(1, 0)
    with pytest.raises(BlockStoreError, match="not a block store"):
        BlockManager(f"{store}/elsewhere").get_rows(0, 0)


@pytest.mark.parametrize("chunk_size", [1, 7, 20])
def test_where_indexes_have_no_room_in_memory_every_range_is_still_right(
    store: str, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    monkeypatch.setattr(remote, "INDEXES_BYTES", 300)
    monkeypatch.setattr(remote, "_SMALL_SHARE", 2)
    for disk_cache_bytes in (0, 1 << 20, 1500):
        manager = BlockManager(
            store, dataset_chunk_size=chunk_size, cache_bytes=0, prefetch=False, disk_cache_bytes=disk_cache_bytes
        )
        rows = [
            row
            for block in range(3)
            for chunk in range(manager.get_block(block).chunk_count(chunk_size))
            for row in manager.get_rows(block, chunk)
        ]
        assert rows == ROWS


# Processes


def read_into(manager: BlockManager, path: str) -> None:
    rows = [row for block in range(3) for row in manager.get_rows(block, 0)]
    Path(path).write_bytes(pickle.dumps(rows))


def test_threads_and_spawned_processes_read_the_same(store: str, tmp_path: Path) -> None:
    manager = BlockManager(store, dataset_chunk_size=20)
    assert manager.get_rows(0, 0) == ROWS[:20]  # a connection is open, and is not taken along
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=read_into, args=(manager, str(tmp_path / f"told{number}"))) for number in range(2)
    ]
    for process in processes:
        process.start()
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda block: manager.get_rows(block % 3, 0), range(12)))
            == [
                ROWS[:20],
                ROWS[20:40],
                ROWS[40:],
            ]
            * 4
        )
    for number, process in enumerate(processes):
        process.join(60)
        assert process.exitcode == 0
        assert pickle.loads((tmp_path / f"told{number}").read_bytes()) == ROWS  # noqa: S301 - our own


def test_nothing_hangs_at_exit_while_something_is_read_ahead(store: str) -> None:
    code = "import sys; from penstock import BlockManager; print(len(BlockManager(sys.argv[1]).get_rows(0, 0)))"
    finished = run(python(code, store), timeout_s=30)
    assert (finished.returncode, finished.output.strip()) == (0, "20")


def test_a_server_that_stops_answering_holds_nobody_at_exit(store: str, proxy: Proxy) -> None:
    code = """
import sys
from penstock import BlockManager
print("ready", len(BlockManager(sys.argv[1], dataset_chunk_size=20).get_rows(0, 0)), flush=True)
sys.stdin.read()
"""
    proxy.trouble.only, proxy.trouble.stall, proxy.trouble.stall_s = "block_00001", 1.0, 60.0
    with held_open(python(code, store)) as process:  # which leaves it 30 s to end
        deadline = monotonic() + 30
        while not any("block_00001" in path for _, path, _ in proxy.requests):  # the next block is read ahead
            assert monotonic() < deadline, "nothing was under way"
            sleep(0.01)
    assert process.returncode == 0


def test_no_secret_is_pickled_or_written(store: str, tmp_path: Path) -> None:
    manager = BlockManager(store)
    manager.get_rows(0, 0)
    opened = BlockStore.open(store)
    assert opened.samples(0, 0, 1)
    told = [pickle.dumps(manager), pickle.dumps(opened), repr(opened.storage).encode()]
    told += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    told += [open_storage(store).get(info.key) for info in open_storage(store).list()]
    assert not [one for one in told if b"tester-secret" in one]
    again: Any = pickle.loads(pickle.dumps(opened))  # noqa: S301 - our own
    assert again.samples(0, 0, 1) == opened.samples(0, 0, 1)


# Trouble and permissions


@pytest.mark.usefixtures("quick_retries")
def test_through_trouble_every_row_arrives(store: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_proxy(s3.url, status=0.2, cut=0.1, stall=0.02, stall_s=0.3) as proxy:
        use_key(monkeypatch, "tester", proxy.url)
        with ThreadPoolExecutor(2) as pool:
            for rows in pool.map(lambda size: all_rows(store, size), [5, 20]):
                assert rows == ROWS
        assert proxy.made["status"] > 2


def test_a_key_that_may_read_reads_and_a_strangers_is_refused(
    store: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, "reader", s3.url)
    assert all_rows(store) == ROWS
    use_key(monkeypatch, "stranger", s3.url)
    with pytest.raises(StorageError, match=r"refused \(403") as caught:
        all_rows(store)
    assert "stranger-secret" not in str(caught.value)


def test_a_store_behind_a_plain_web_server_is_read(tmp_path: Path, cache: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "out", 20)
    contents = {f"data/store/{name}": data for name, data in files(tmp_path / "out").items()}
    with web_server(files=contents) as web:
        assert all_rows(f"{web.url}/data/store") == ROWS
        assert damages(f"{web.url}/data/store") == {}
        begun = len(web.requests)
        assert all_rows(f"{web.url}/data/store") == ROWS
        assert not [request for request in web.requests[begun:] if request.startswith("GET data/store/blocks")]
        web.etags = "none"  # what has no version is read, and not kept
        before = len(list(cache.glob("??/*")))
        assert all_rows(f"{web.url}/data/store") == ROWS
        assert len(list(cache.glob("??/*"))) == before


def test_a_growing_store_is_read_as_it_grows(tmp_path: Path, bucket: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    seen = []

    def look(progress: Any) -> None:
        if progress.blocks:
            manager = BlockManager(bucket, dataset_chunk_size=20)
            seen.append((progress.state, manager.get_total_blocks(), manager.get_rows(0, 0) == ROWS[:20]))

    ingest(source, bucket, 20, on_progress=look)
    assert seen[-1] == ("complete", 3, True)
    assert all(right for _, _, right in seen)


def test_the_cache_stays_within_its_budget(tmp_path: Path, bucket: str, cache: Path) -> None:
    rows = [{"text": os.urandom(100_000).hex()} for _ in range(40)]
    ingest(write_jsonl(tmp_path / "rows.jsonl", rows), bucket, 10)
    budget = 3 << 20
    manager = BlockManager(bucket, dataset_chunk_size=5, disk_cache_bytes=budget)
    for _ in range(2):
        assert [row for block in range(4) for chunk in (0, 1) for row in manager.get_rows(block, chunk)] == rows
        assert 0 < sum(path.stat().st_size for path in cache.glob("??/*")) <= budget

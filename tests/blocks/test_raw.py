"""A raw data set in place of a block store: its blocks land in the background, and the first are read meanwhile."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blocks.data import numbered, write_jsonl
from equipment.hub import Fault, Hub, hub_server
from equipment.processes import held_open, python
from equipment.trees import tree
from penstock.blocks import BlockManager, ingest, prepare_blocks
from penstock.errors import BlockStoreError, ConfigError, SourceError

ROWS = numbered(25)
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def slow(tmp_path: Path, hub: Hub) -> threading.Event:
    """A data set of two files; the second comes when the event is set."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write_jsonl(folder / "train-a.jsonl", ROWS[:10])
    write_jsonl(folder / "train-b.jsonl", ROWS[10:])
    hub.add("someone/rows", folder)
    hub.gates["train-b"] = threading.Event()
    return hub.gates["train-b"]


def texts_of(manager: BlockManager) -> list[str]:
    """Every text, asking for one block after the other as a reader does that knows nothing."""
    found: list[str] = []
    block_id = 0
    while True:
        block = manager.get_block(block_id)
        for chunk_id in range(block.chunk_count(manager.dataset_chunk_size)):
            found += manager.get_chunk(block_id, chunk_id)
        if block.is_last_block:
            return found
        block_id += 1


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ingest_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock ingest"]


@pytest.mark.parametrize("samples_per_block", [1, 10, 24, 25, 26])
def test_a_raw_file_reads_like_the_block_store_it_becomes(tmp_path: Path, raw: Path, samples_per_block: int) -> None:
    with BlockManager(raw, samples_per_block, 4) as manager:
        assert texts_of(manager) == TEXTS
        assert manager.get_total_blocks() == -(-25 // samples_per_block)
        with pytest.raises(BlockStoreError, match="has no block 99: its blocks are 0 to"):
            manager.get_block(99)
        assert [row["id"] for row in manager.get_rows(0, 0, 25)] == list(range(min(25, samples_per_block)))
    made = ingest(raw, tmp_path / "store", samples_per_block)
    assert manager.manifest == made


def test_folders_and_globs_and_empty_files_are_raw_data_sets_too(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "b.txt").write_text("three\n")
    assert texts_of(BlockManager(folder, 2)) == ["one", "two", "three"]
    assert texts_of(BlockManager(f"{folder}/b*")) == ["three"]
    (folder / "c.jsonl").write_text("")
    empty = BlockManager(folder / "c.jsonl")
    assert not empty.is_last_block(0)
    assert empty.get_total_blocks() == 0
    with pytest.raises(BlockStoreError, match="has no block 0"):
        empty.get_block(0)


def test_the_first_blocks_are_read_while_the_others_have_not_come(slow: threading.Event) -> None:
    with BlockManager("hf://someone/rows", 4, 4) as manager:
        assert manager.get_chunk(0, 0) == TEXTS[:4]
        assert manager.get_block(1).start_index == 4
        assert not manager.is_last_block(0)
        assert manager.get_total_blocks() is None
        assert manager.facts(5) is None
        assert not manager.manifest.complete
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(manager.get_chunk, 4, 0), pool.submit(lambda: manager.is_last_block(6))]
            assert not any(future.done() for future in waiting)
            slow.set()
            assert waiting[0].result(60) == TEXTS[16:20]
            assert waiting[1].result(60)
        assert manager.get_total_blocks() == 7
        assert manager.manifest.total_samples == 25


def test_an_error_of_the_source_is_an_error_and_never_an_end(slow: threading.Event, hub: Hub) -> None:
    with BlockManager("hf://someone/rows", 4, 4) as manager:
        assert manager.get_chunk(0, 0) == TEXTS[:4]
        hub.faults.append(Fault("train-b", 1, 403))
        slow.set()
        for ask in (lambda: manager.get_block(5), lambda: manager.get_chunk(6, 0), lambda: manager.is_last_block(1)):
            with pytest.raises(SourceError, match=r"train-b.jsonl.*403"):
                ask()
        with pytest.raises(SourceError, match="403"):  # whoever polls learns of it too
            manager.get_total_blocks()
        with pytest.raises(SourceError, match="403"):
            manager.facts(3)
        assert manager.get_chunk(1, 0) == TEXTS[4:8]  # what has landed stays readable
    assert texts_of(BlockManager("hf://someone/rows", 4, 4)) == TEXTS  # and opened again, it goes on


def test_a_bad_row_is_named_to_whoever_waits_for_its_block(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:7], b"not json", *ROWS[7:]])
    manager = BlockManager(raw, 5, 5)
    assert manager.get_chunk(0, 0) == TEXTS[:5]
    with pytest.raises(SourceError, match=r"rows.jsonl:8: not JSON"):
        manager.get_block(1)


def test_the_second_time_it_is_there_already(cache: Path, raw: Path) -> None:
    texts_of(BlockManager(raw, 10))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    again = BlockManager(raw, 10)
    assert texts_of(again) == TEXTS
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert prepare_blocks(raw, 10) == str(again.manifest and next((cache / "blocks").iterdir()))


def test_a_changed_file_or_block_size_is_another_data_set(cache: Path, raw: Path) -> None:
    texts_of(BlockManager(raw, 10))
    texts_of(BlockManager(raw, 5))
    write_jsonl(raw, ROWS[:3])
    assert texts_of(BlockManager(raw, 10)) == TEXTS[:3]
    assert len(list((cache / "blocks").iterdir())) == 3


def test_closing_ends_the_ingest_and_opening_again_goes_on(slow: threading.Event) -> None:
    manager = BlockManager("hf://someone/rows", 4, 4)
    assert manager.get_chunk(1, 0) == TEXTS[4:8]
    threading.Timer(0.2, slow.set).start()  # what it waits for has to come before it can end
    manager.close()
    eventually(lambda: ingest_threads() == [])
    assert texts_of(manager) == TEXTS


def test_a_manager_nobody_holds_ends_its_ingest(slow: threading.Event) -> None:
    manager = BlockManager("hf://someone/rows", 4, 4)
    manager.get_block(0)
    assert len(ingest_threads()) == 1
    threading.Timer(0.2, slow.set).start()
    del manager
    gc.collect()
    eventually(lambda: ingest_threads() == [])


def test_another_process_gets_the_very_version_this_one_has(tmp_path: Path, slow: threading.Event, hub: Hub) -> None:
    manager = BlockManager("hf://someone/rows", 4, 4)
    first = manager.identity()
    newer = tmp_path / "newer"
    newer.mkdir()
    write_jsonl(newer / "train-a.jsonl", ROWS[:2])
    hub.add("someone/rows", newer)
    slow.set()
    copy = pickle.loads(pickle.dumps(manager))  # noqa: S301 - our own
    assert copy.identity() == first
    assert texts_of(copy) == TEXTS
    assert texts_of(BlockManager("hf://someone/rows", 4, 4)) == TEXTS[:2]


def test_threads_that_open_it_together_read_the_same(raw: Path) -> None:
    manager = BlockManager(raw, 3, 2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: texts_of(manager), range(8)))
    assert found == [TEXTS] * 8


READ_ON = """
import sys
from penstock.blocks import BlockManager
manager = BlockManager(sys.argv[1], 500, 500)
manager.get_block(0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_when_the_process_that_ingests_is_killed_another_goes_on(tmp_path: Path, cache: Path) -> None:
    rows = numbered(60_000)
    raw = write_jsonl(tmp_path / "rows.jsonl", rows)
    with held_open(python(READ_ON, str(raw))) as first:
        manager = BlockManager(raw, 500, 500)
        assert len(manager.get_chunk(0, 0)) == 500
        os.kill(first.pid, signal.SIGKILL)
        assert texts_of(manager) == [row["text"] for row in rows]
    ingest(raw, tmp_path / "whole", 500)
    assert tree(next((cache / "blocks").iterdir())) == tree(tmp_path / "whole")


def test_a_process_that_ends_early_is_not_held_up_by_its_ingest(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "rows.jsonl", numbered(60_000))
    with held_open(python(READ_ON, str(raw))) as reader:
        pass
    assert reader.returncode == 0
    assert len(texts_of(BlockManager(raw, 500, 500))) == 60_000


def test_what_is_no_data_set_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(BlockStoreError, match=r"nothing is not a block store, and no source of one either"):
        BlockManager(tmp_path / "nothing").get_block(0)
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(BlockStoreError, match=r"no reader for '.png'"):
        BlockManager(tmp_path / "image.png").get_block(0)
    with pytest.raises(SourceError, match="is no name of a data set"):
        BlockManager("hf://a/b/c").get_block(0)
    with pytest.raises(ConfigError, match="ftp:// is not supported"):
        BlockManager("ftp://bucket/prefix").get_block(0)


def test_a_store_that_lost_its_manifest_is_not_taken_for_raw_data(tmp_path: Path, raw: Path) -> None:
    ingest(raw, tmp_path / "store", 10)
    (tmp_path / "store/block_manifest.json").unlink()
    with pytest.raises(BlockStoreError, match=r"has blocks and neither manifest nor journal"):
        BlockManager(tmp_path / "store").get_block(0)

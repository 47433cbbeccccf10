"""Sources that change while they are ingested or between two tries, and stores whose blocks do."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocks.data import all_rows, numbered, write_jsonl
from equipment.hub import Hub, hub_server
from equipment.trees import tree
from penstock.blocks import BlockManager, IngestProgress, ingest
from penstock.blocks.journal import Journal
from penstock.errors import BadRowError, CorruptBlockError, SourceError
from penstock.storage import LocalStorage

ROWS = [{"text": f"row {number:05d} " + "x" * 60} for number in range(6000)]
OTHER = [{"text": f"ROW {number:05d} " + "x" * 60} for number in range(6000)]


class _Stop(Exception):
    pass


def stop_after(blocks: int) -> object:
    def on_progress(progress: IngestProgress) -> None:
        if progress.blocks >= blocks:
            raise _Stop

    return on_progress


def interrupted(source: Path, dest: Path, blocks: int) -> None:
    with pytest.raises(_Stop):
        ingest(source, dest, 100, on_progress=stop_after(blocks))  # pyright: ignore[reportArgumentType]


def rewrite(path: Path, rows: list[dict[str, str]]) -> None:
    write_jsonl(path, rows)
    os.utime(path, ns=(0, 10**18))  # later than before, however coarse the clock is


@pytest.mark.parametrize("place", [2000, 5000])
def test_a_file_that_was_written_between_two_tries_is_read_again(
    tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", numbered(150))
    write_jsonl(folder / "b.jsonl", ROWS)
    interrupted(folder, tmp_path / "out", 40)
    kept = tmp_path / "out/blocks/block_00000.jsonl"
    before = kept.stat().st_mtime_ns
    # In the middle, and of the same length: neither its size nor its ends tell.
    rewrite(folder / "b.jsonl", [*ROWS[: place - 1], OTHER[place], *ROWS[place:]])
    with caplog.at_level(logging.WARNING):
        ingest(folder, tmp_path / "out", 100)
    assert "is written again: the files it was read from were written since" in caplog.text
    ingest(folder, tmp_path / "whole", 100)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert OTHER[place] in all_rows(tmp_path / "out", 100)
    assert kept.stat().st_mtime_ns == before, "blocks of other files alone are kept"


def test_a_damaged_file_that_was_replaced_leaves_none_of_its_rows_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    lines = "".join(f"line {number} {number * 7919 % 1000}\n" for number in range(30_000)).encode()
    good = gzip.compress(lines, 0, mtime=0)  # not compressed at all: a flipped bit is found by the checksum alone
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    path.write_bytes(bad)
    with pytest.raises(SourceError, match="damaged or truncated"):
        ingest(path, tmp_path / "out", 100)
    path.write_bytes(good)
    os.utime(path, ns=(0, 10**18))
    ingest(path, tmp_path / "out", 100)
    ingest(path, tmp_path / "whole", 100)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("change", ["truncate", "append", "overwrite"])
def test_a_file_that_is_written_while_it_is_read_is_told(tmp_path: Path, change: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row for _ in range(4) for row in ROWS])
    line = len(path.read_bytes()) // (4 * len(ROWS))
    done = []

    def on_progress(progress: IngestProgress) -> None:
        if progress.blocks and not done:
            done.append(True)
            if change == "truncate":
                os.truncate(path, line * 20_000)
            with path.open("r+b") as file:
                if change != "truncate":
                    file.seek(0, os.SEEK_END if change == "append" else os.SEEK_SET)
                    file.write(b'{"text":"new"}\n' if change == "append" else b" " * (line - 1))

    with pytest.raises(SourceError, match=r"a\.jsonl was written while it was read"):
        ingest(path, tmp_path / "out", 100, on_progress=on_progress)
    assert not (tmp_path / "out/block_manifest.json").exists()


def test_a_file_that_changed_is_another_raw_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert BlockManager(path, 6000, 6000).get_chunk(0, 0)[3000] == ROWS[3000]["text"]
    rewrite(path, [*ROWS[:3000], OTHER[3000], *ROWS[3001:]])
    assert BlockManager(path, 6000, 6000).get_chunk(0, 0)[3000] == OTHER[3000]["text"]


def test_blocks_lost_between_two_tries_are_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    interrupted(path, tmp_path / "out", 10)
    os.truncate(tmp_path / "out/blocks/block_00003.jsonl", 50)
    (tmp_path / "out/blocks/block_00005.idx").unlink()
    with caplog.at_level(logging.WARNING):
        ingest(path, tmp_path / "out", 100)
    assert "block 3 and what follows is written again: blocks/block_00003.jsonl has 50 bytes" in caplog.text
    ingest(path, tmp_path / "whole", 100)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_complete_store_with_a_lost_block_is_not_called_complete(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    ingest(path, tmp_path / "out", 1000)
    (tmp_path / "out/blocks/block_00002.jsonl").unlink()
    with pytest.raises(CorruptBlockError, match=r"is complete, but blocks/block_00002\.jsonl is missing"):
        ingest(path, tmp_path / "out", 1000)


def test_a_block_in_anothers_place_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    ingest(path, tmp_path / "out", 10)
    for suffix in ("jsonl", "idx"):
        shutil.copy(tmp_path / f"out/blocks/block_00001.{suffix}", tmp_path / f"out/blocks/block_00000.{suffix}")
    with pytest.raises(CorruptBlockError, match=r"block_00000\.idx is not the index of a block with 10 samples"):
        BlockManager(tmp_path / "out").get_chunk(0, 0)


def test_a_damaged_cache_says_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write_jsonl(tmp_path / "a.jsonl", numbered(30))
    BlockManager(path).get_chunk(0, 0)
    (store,) = (tmp_path / "cache/blocks").iterdir()
    os.truncate(store / "blocks/block_00000.jsonl", 50)
    with pytest.raises(CorruptBlockError, match=rf"made from {path}: delete {store}, and it is made anew"):
        BlockManager(path).get_chunk(0, 0)
    shutil.rmtree(store)
    assert len(BlockManager(path).get_chunk(0, 0)) == 30


def test_a_block_store_is_no_source_of_another_but_its_blocks_are(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "a.jsonl", numbered(30)), tmp_path / "out", 10)
    with pytest.raises(SourceError, match=r"out is a block store already: use it as it is, or name .*out/blocks"):
        ingest(tmp_path / "out", tmp_path / "again", 7)
    ingest(tmp_path / "out/blocks", tmp_path / "again", 7)
    assert all_rows(tmp_path / "again") == numbered(30)
    (tmp_path / "folder").mkdir()
    shutil.copytree(tmp_path / "out", tmp_path / "folder/store")
    write_jsonl(tmp_path / "folder/b.jsonl", numbered(4))
    ingest(tmp_path / "folder", tmp_path / "third")
    assert all_rows(tmp_path / "third") == numbered(4)


def test_a_source_without_samples_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with caplog.at_level(logging.WARNING):
        ingest(tmp_path / "a.jsonl", tmp_path / "out")
    assert "a.jsonl holds no samples" in caplog.text


def test_how_a_raw_data_set_is_read_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write_jsonl(tmp_path / "a.jsonl", [{"title": "one", "text": "1"}, b"bad", {"title": "two", "text": "2"}])
    with pytest.raises(BadRowError):
        BlockManager(path).get_block(0)
    assert BlockManager(path, text_column="title", on_bad_row="skip").get_chunk(0, 0) == ["one", "two"]
    (tmp_path / "b.txt").write_bytes("gr\u00fcn\n".encode("latin-1"))
    assert BlockManager(tmp_path / "b.txt", encoding="latin-1").get_chunk(0, 0) == ["gr\u00fcn"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        yield hub


def test_a_finished_hub_data_set_needs_the_hub_no_more(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "repository").mkdir()
    write_jsonl(tmp_path / "repository/train.jsonl", numbered(25))
    commit = hub.add("someone/rows", tmp_path / "repository")
    made = ingest("hf://someone/rows", tmp_path / "out", 10)
    assert len(BlockManager("hf://someone/rows", 10).get_chunk(2, 0)) == 5
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    seen: list[IngestProgress] = []
    assert ingest("hf://someone/rows", tmp_path / "out", 10, on_progress=seen.append) == made
    assert [progress.state for progress in seen] == ["already complete"]
    with caplog.at_level(logging.WARNING):
        assert len(BlockManager("hf://someone/rows", 10).get_chunk(2, 0)) == 5
    assert f"taking the copy in the cache, of commit {commit}" in caplog.text
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        BlockManager("hf://someone/rows", 11).get_block(0)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        ingest("hf://someone/rows", tmp_path / "out", 11)


def test_a_hub_data_set_whose_writer_was_killed_while_tidying_up_is_tidied_up(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "repository").mkdir()
    write_jsonl(tmp_path / "repository/train.jsonl", numbered(25))
    hub.add("someone/rows", tmp_path / "repository")
    made = ingest("hf://someone/rows", tmp_path / "out", 10)
    before = tree(tmp_path / "out")
    Journal(LocalStorage(tmp_path / "out")).begin(made.header)
    assert ingest("hf://someone/rows", tmp_path / "out", 10) == made
    assert tree(tmp_path / "out") == before

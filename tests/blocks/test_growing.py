"""A store that is still being written can be read, block by block, as far as it has come."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks.data import all_rows, damages, numbered, write_jsonl
from equipment.trees import tree
from penstock.blocks import BlockManager, BlockStore, IngestProgress, Manifest, ingest
from penstock.blocks.store import read_manifest
from penstock.errors import BadRowError
from penstock.storage import LocalStorage
from sources.suite import rows_a_batch

ROWS = numbered(12)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def test_each_block_can_be_read_as_soon_as_it_is_whole(tmp_path: Path, source: Path) -> None:
    seen = []

    def look(progress: IngestProgress) -> None:
        if progress.state == "running":
            manager = BlockManager(tmp_path / "out")
            rows = all_rows(tmp_path / "out")
            assert rows == ROWS[: progress.blocks * 5]
            assert manager.get_total_blocks() is None
            assert not any(manager.is_last_block(block_id) for block_id in range(progress.blocks + 1))
            assert not manager.manifest.complete
            assert damages(tmp_path / "out") == {}
            seen.append(len(rows))

    with rows_a_batch(1):
        ingest(source, tmp_path / "out", 5, on_progress=look)
    assert seen == [0] * 4 + [5] * 5 + [10] * 3
    assert BlockManager(tmp_path / "out").get_total_blocks() == 3


def test_a_growing_store_is_the_data_set_it_will_be(tmp_path: Path, source: Path) -> None:
    growing: list[BlockManager] = []

    def look(progress: IngestProgress) -> None:
        if progress.state == "running":
            growing.append(BlockManager(tmp_path / "out"))
            growing[-1].get_total_blocks()

    with rows_a_batch(1):
        ingest(source, tmp_path / "out", 5, on_progress=look)
    whole = BlockManager(tmp_path / "out")
    assert {manager.identity() for manager in growing} == {whole.identity()}
    assert growing[-1].manifest.blocks == whole.manifest.blocks[:2]
    assert growing[-1].facts(1) == whole.facts(1)
    assert growing[-1].facts(2) == whole.facts(2), "a block that came later is not seen"
    assert growing[-1].get_rows(1, 0) == ROWS[5:10]


def test_reading_a_growing_store_writes_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, b"?"])
    with pytest.raises(BadRowError):
        ingest(source, tmp_path / "out", 5)
    before = tree(tmp_path / "out")
    assert all_rows(tmp_path / "out") == ROWS[:10]
    assert tree(tmp_path / "out") == before


def test_bad_rows_so_far_are_told(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], b"?", *ROWS[1:]])
    seen: list[Manifest] = []

    def look(_: IngestProgress) -> None:
        seen.append(BlockStore.open(tmp_path / "out").manifest)

    with rows_a_batch(1):
        ingest(source, tmp_path / "out", 5, on_bad_row="skip", on_progress=look)
    assert {manifest.skipped_count for manifest in seen if manifest.blocks} == {1}
    assert [row.position for row in seen[-1].skipped_rows] == ["rows.jsonl:2"]


class FinishedMeanwhile(LocalStorage):
    """A store whose ingest ends between two reads of a reader."""

    def __init__(self, root: Path, source: Path, before_key: str) -> None:
        super().__init__(root)
        self._source = source
        self._before_key = before_key

    def get(self, key: str) -> bytes:
        if key == self._before_key:
            ingest(self._source, self.root, 5, on_bad_row="skip")
        return super().get(key)


@pytest.mark.parametrize("before_key", ["block_manifest.json", ".ingest/header.json", ".ingest/block_00001.json"])
def test_an_ingest_that_ends_while_its_journal_is_read_is_complete(tmp_path: Path, before_key: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, b"?"])
    with pytest.raises(BadRowError):
        ingest(source, tmp_path / "out", 5)
    manifest = read_manifest(FinishedMeanwhile(tmp_path / "out", source, before_key))
    assert manifest.complete
    assert manifest.total_samples == 12

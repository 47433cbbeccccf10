"""The manifest and the files it lists: their fields, and their very bytes."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from blocks.data import all_rows, numbered, write_jsonl
from equipment.trees import tree
from penstock.blocks import BlockManager, ingest, process_raw_dataset_to_blocks
from penstock.blocks.index import index_of_lines

GOLDEN = Path(__file__).parent / "golden"
FIELDS = [
    "version",
    "dataset_name",
    "source",
    "dataset_id",
    "block_size",
    "block_bytes",
    "text_column",
    "fingerprint",
    "total_samples",
    "total_blocks",
    "complete",
    "skipped_count",
    "skipped_rows",
    "blocks",
]
BLOCK_FIELDS = ["block_id", "file", "sample_count", "start_index", "end_index", "size_bytes", "checksum"]


def manifest_of(dest: Path) -> dict[str, Any]:
    return orjson.loads((dest / "block_manifest.json").read_bytes())


def ingest_golden(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How `golden/dataset` was made. Write it anew only with a new version of the format, and keep the old one read."""
    monkeypatch.chdir(GOLDEN)
    ingest("rows.jsonl", dest, block_size=3, on_bad_row="skip")


def test_the_format_on_disk_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest_golden(tmp_path / "out", monkeypatch)
    assert tree(tmp_path / "out") == tree(GOLDEN / "dataset")


def test_a_data_set_written_before_is_still_read() -> None:
    assert all_rows(GOLDEN / "dataset") == [
        {"text": "one", "id": 1},
        {"id": 2, "text": "zwei é ü"},
        {"text": ""},
        {"text": "three", "nested": {"a": [1, 2.5, None]}},
    ]


def test_the_manifest_has_the_fields_of_the_design(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", numbered(25)), tmp_path / "out", 10, 1000, dataset_name="named")
    manifest = manifest_of(tmp_path / "out")
    assert list(manifest) == FIELDS
    assert manifest["version"] == 1
    assert manifest["dataset_name"] == "named"
    assert manifest["source"] == str(tmp_path / "rows.jsonl")
    assert (manifest["block_size"], manifest["block_bytes"], manifest["text_column"]) == (10, 1000, "text")
    assert (manifest["total_samples"], manifest["total_blocks"], manifest["complete"]) == (25, 3, True)
    assert (manifest["skipped_count"], manifest["skipped_rows"]) == (0, [])
    assert [list(block) for block in manifest["blocks"]] == [BLOCK_FIELDS] * 3
    assert [block["file"] for block in manifest["blocks"]] == [f"blocks/block_0000{n}.jsonl" for n in range(3)]
    assert [(block["start_index"], block["end_index"]) for block in manifest["blocks"]] == [(0, 10), (10, 20), (20, 25)]
    for block in manifest["blocks"]:
        assert (tmp_path / "out" / block["file"]).stat().st_size == block["size_bytes"]


def test_the_store_is_the_manifest_the_blocks_and_their_indexes(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", numbered(11)), tmp_path / "out", 10)
    assert sorted(tree(tmp_path / "out")) == [
        "block_manifest.json",
        "blocks",
        "blocks/block_00000.idx",
        "blocks/block_00000.jsonl",
        "blocks/block_00001.idx",
        "blocks/block_00001.jsonl",
    ]


def test_another_folder_at_another_time_has_the_same_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*numbered(12), b"[]"])
    ingest(source, tmp_path / "out", 5, on_bad_row="skip")
    source.touch()
    ingest(source, tmp_path / "elsewhere" / "deep", 5, on_bad_row="skip")
    assert tree(tmp_path / "out") == tree(tmp_path / "elsewhere" / "deep")


def test_a_moved_store_is_the_same_store(tmp_path: Path) -> None:
    rows = numbered(12)
    ingest(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", 5)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    assert all_rows(tmp_path / "moved") == rows


def test_the_name_of_the_source_is_the_name_of_the_data_set(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "wiki.en.jsonl", numbered(1)), tmp_path / "out")
    assert manifest_of(tmp_path / "out")["dataset_name"] == "wiki"


def test_the_small_face_returns_the_manifest(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", numbered(12))
    info = process_raw_dataset_to_blocks(source, tmp_path / "out", "named", 5)
    assert info == manifest_of(tmp_path / "out")
    assert (info["dataset_name"], info["block_size"], info["total_blocks"]) == ("named", 5, 3)


def test_content_and_options_make_the_identity(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", numbered(12))
    write_jsonl(tmp_path / "b.jsonl", [{"text": "first", "title": ""}, *numbered(11)])
    made = [
        ingest(tmp_path / "a.jsonl", tmp_path / "1", 5),
        ingest(tmp_path / "a.jsonl", tmp_path / "2", 6),
        ingest(tmp_path / "a.jsonl", tmp_path / "3", 5, 100),
        ingest(tmp_path / "a.jsonl", tmp_path / "4", 5, no_text=True),
        ingest(tmp_path / "b.jsonl", tmp_path / "5", 5),
        ingest(tmp_path / "b.jsonl", tmp_path / "6", 5, text_column="title", on_bad_row="skip"),
    ]
    assert len({manifest.header.dataset_id for manifest in made}) == len(made)
    assert len({manifest.fingerprint for manifest in made}) == len(made)
    same = ingest(tmp_path / "a.jsonl", tmp_path / "7", 5, text_column="text", dataset_name="called otherwise")
    assert same.header.dataset_id == made[0].header.dataset_id
    assert same.fingerprint == made[0].fingerprint


def test_the_index_says_where_each_sample_begins(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", numbered(12)), tmp_path / "out", 10)
    for name, count in (("block_00000", 10), ("block_00001", 2)):
        block = (tmp_path / "out/blocks" / f"{name}.jsonl").read_bytes()
        index = (tmp_path / "out/blocks" / f"{name}.idx").read_bytes()
        assert index[:8] == b"PENSIDX1"
        assert int.from_bytes(index[8:16], "little") == count
        offsets = np.frombuffer(index[16:], dtype=[("offset", "<u8"), ("crc", "<u4")])["offset"].tolist()
        assert offsets[0] == 0
        assert offsets[-1] == len(block)
        lines = [block[begin:end] for begin, end in pairwise(offsets)]
        assert lines == block.splitlines(keepends=True)
        assert index == index_of_lines(lines)


def test_opening_a_store_reads_only_its_manifest(tmp_path: Path) -> None:
    ingest(write_jsonl(tmp_path / "rows.jsonl", numbered(12)), tmp_path / "out", 5)
    shutil.rmtree(tmp_path / "out/blocks")
    manager = BlockManager(tmp_path / "out")
    assert [manager.get_block(block_id).sample_count for block_id in range(3)] == [5, 5, 2]

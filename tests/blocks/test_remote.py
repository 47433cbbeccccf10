"""Block stores on an object store: written once whatever happens, read by ranges, the same bytes as on a disk."""

from __future__ import annotations

from pathlib import Path

from blocks.data import all_rows, damages, numbered, write_jsonl
from penstock.blocks import ingest
from penstock.storage import open_storage

ROWS = numbered(25)


def objects(url: str) -> dict[str, bytes]:
    storage = open_storage(url)
    return {info.key: storage.get(info.key) for info in storage.list()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_ingest_writes_what_it_writes_on_a_disk(tmp_path: Path, bucket: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    ingest(source, tmp_path / "out", 10)
    ingest(source, bucket, 10)
    assert objects(bucket) == files(tmp_path / "out")
    assert all_rows(bucket) == ROWS
    assert damages(bucket) == {}

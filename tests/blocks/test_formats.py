"""Every format becomes the same block store, and an ingest of any that is killed ends as if it had not been."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from blocks.data import all_rows, damages, leftovers, numbered
from equipment.faults import run_killed_at
from equipment.processes import python
from equipment.trees import tree
from penstock.blocks import BlockManager, ingest
from penstock.errors import SourceError
from sources.making import PACKERS, arrow_file_of, arrow_stream_of, jsonl_of, parquet_of, tar_of, zip_of

ROWS = numbered(25)
TABLE = pa.Table.from_pylist(ROWS)


def csv_of(delimiter: str = ",") -> bytes:
    lines = [f'"{row["text"]}"{delimiter}{row["id"]}' for row in ROWS]
    return "\r\n".join([f"text{delimiter}id", *lines]).encode()


FORMATS: dict[str, Callable[[], bytes]] = {
    "rows.jsonl": lambda: jsonl_of(ROWS),
    "rows.ndjson": lambda: jsonl_of(ROWS),
    "rows.json": lambda: orjson.dumps(ROWS),
    "pretty.json": lambda: orjson.dumps(ROWS, option=orjson.OPT_INDENT_2),
    "many.json": lambda: b" ".join(map(orjson.dumps, ROWS)),
    "rows.csv": csv_of,
    "rows.tsv": lambda: csv_of("\t"),
    "rows.parquet": lambda: parquet_of(TABLE, 7),
    "rows.arrow": lambda: arrow_file_of(TABLE, 7),
    "stream.arrow": lambda: arrow_stream_of(TABLE, 7),
    "rows.zip": lambda: zip_of({"a.jsonl": jsonl_of(ROWS[:12]), "b.parquet": parquet_of(TABLE.slice(12))}),
    "rows.tar": lambda: tar_of({"z.json": orjson.dumps(ROWS[:12]), "a.jsonl": jsonl_of(ROWS[12:])}),
    "rows.tgz": lambda: PACKERS[".gz"](tar_of({"a.jsonl": jsonl_of(ROWS)})),
    "rows.parquet.xz": lambda: PACKERS[".xz"](parquet_of(TABLE, 7)),
    **{f"rows.jsonl{codec}": lambda pack=pack: pack(jsonl_of(ROWS)) for codec, pack in PACKERS.items()},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_samples_in_the_same_blocks(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMATS[name]())
    manifest = ingest(tmp_path / name, tmp_path / "out", 10)
    manager = BlockManager(tmp_path / "out")
    assert manifest.header.text_column == "text"
    assert [(block.start_index, block.sample_count) for block in manifest.blocks] == [(0, 10), (10, 10), (20, 5)]
    texts = [text for block_id in range(3) for text in manager.get_chunk(block_id, 0)]
    assert texts == [row["text"] for row in ROWS]
    assert [int(row["id"]) for row in all_rows(tmp_path / "out")] == list(range(25))
    assert damages(tmp_path / "out") == {}
    before = tree(tmp_path / "out")
    assert ingest(tmp_path / name, tmp_path / "out", 10) == manifest
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.tgz"])
def test_a_damaged_file_is_told_and_never_a_complete_data_set(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMATS[name]()[:-4])
    with pytest.raises(SourceError, match=f"{name}: cannot be read to its end"):
        ingest(tmp_path / name, tmp_path / "out", 10)
    assert not (tmp_path / "out/block_manifest.json").exists()
    assert all_rows(tmp_path / "out") == ROWS[:20]
    assert leftovers(tmp_path / "out") == []


INGEST = "import sys; from penstock.blocks import ingest; ingest(sys.argv[1], sys.argv[2], 10)"
POINTS = [
    ("storage.before_rename", "blocks/block_00000.jsonl"),
    ("storage.before_rename", ".ingest/block_00000.json"),
    ("storage.before_rename", "blocks/block_00001.jsonl"),
    ("storage.before_rename", ".ingest/block_00002.json"),
]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv", "rows.parquet"])
def test_killed_anywhere_it_ends_like_one_never_killed(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    source.write_bytes(FORMATS[name]())
    ingest(source, tmp_path / "whole", 10)

    def kill_and_rerun(point: tuple[str, str]) -> None:
        dest = tmp_path / point[1].replace("/", "-")
        killed = run_killed_at(python(INGEST, str(source), str(dest)), *point)
        assert killed.fired
        assert killed.finished.returncode == -signal.SIGKILL
        ingest(source, dest, 10)
        assert tree(dest) == tree(tmp_path / "whole"), f"differs after a kill at {point}"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill_and_rerun, POINTS))

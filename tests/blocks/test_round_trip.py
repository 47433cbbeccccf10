"""What goes in comes out: every row once, in order, whatever the sizes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks.data import all_rows, damages, numbered, write_jsonl
from penstock.blocks import BlockManager, ingest

BLOCK_SIZE = 6


def expected_blocks(rows: list[dict[str, Any]], block_size: int, block_bytes: int | None) -> list[list[dict[str, Any]]]:
    """The rule in its plainest words: a block closes when it is full by count or by bytes."""
    blocks: list[list[dict[str, Any]]] = []
    for row in rows:
        if not blocks or len(blocks[-1]) >= block_size or (block_bytes and stored_bytes(blocks[-1]) >= block_bytes):
            blocks.append([])
        blocks[-1].append(row)
    return blocks


def stored_bytes(rows: list[dict[str, Any]]) -> int:
    return sum(len(orjson.dumps(row)) + 1 for row in rows)


def check(dest: Path, rows: list[dict[str, Any]], block_size: int, block_bytes: int | None, chunk_size: int) -> None:
    manager = BlockManager(dest, dataset_chunk_size=chunk_size)
    blocks = expected_blocks(rows, block_size, block_bytes)
    assert manager.get_total_blocks() == len(blocks)
    assert manager.manifest.total_samples == len(rows)
    start = 0
    for block_id, block_rows in enumerate(blocks):
        block = manager.get_block(block_id)
        assert (block.block_id, block.start_index, block.sample_count) == (block_id, start, len(block_rows))
        assert block.is_last_block == manager.is_last_block(block_id) == (block_id == len(blocks) - 1)
        chunks = [block_rows[at : at + chunk_size] for at in range(0, len(block_rows), chunk_size)]
        assert block.chunk_count(chunk_size) == len(chunks)
        for chunk_id, chunk in enumerate(chunks):
            assert manager.get_rows(block_id, chunk_id) == chunk
            assert manager.get_chunk(block_id, chunk_id) == [row["text"] for row in chunk]
        start += len(block_rows)
    assert damages(dest) == {}


@pytest.mark.parametrize("count", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 10 * BLOCK_SIZE])
@pytest.mark.parametrize("chunk_size", [1, 4, BLOCK_SIZE, 100])
def test_every_row_comes_back_at_the_edges_of_blocks(tmp_path: Path, count: int, chunk_size: int) -> None:
    rows = numbered(count)
    ingest(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", BLOCK_SIZE)
    check(tmp_path / "out", rows, BLOCK_SIZE, None, chunk_size)


values = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=4))
rows_with_text = st.lists(
    st.builds(
        lambda text, extra: {**extra, "text": text},
        st.text(max_size=12),
        st.dictionaries(st.text(), values, max_size=2),
    ),
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_with_text,
    block_size=st.integers(1, 9) | st.just(100_000),
    block_bytes=st.none() | st.integers(1, 200),
    chunk_size=st.integers(1, 10),
)
def test_every_row_comes_back_whatever_the_sizes(
    rows: list[dict[str, Any]], block_size: int, block_bytes: int | None, chunk_size: int
) -> None:
    with TemporaryDirectory() as folder:
        source = write_jsonl(Path(folder, "rows.jsonl"), rows)
        ingest(source, Path(folder, "out"), block_size, block_bytes, text_column="text" if rows else None)
        check(Path(folder, "out"), rows, block_size, block_bytes, chunk_size)


def test_sizes_of_blocks_do_not_change_the_samples(tmp_path: Path) -> None:
    rows = numbered(40)
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    for block_size, block_bytes in [(1, None), (7, None), (1000, None), (1000, 100), (3, 1)]:
        dest = tmp_path / f"{block_size}-{block_bytes}"
        ingest(source, dest, block_size, block_bytes)
        assert all_rows(dest) == rows


def test_huge_rows_make_small_blocks(tmp_path: Path) -> None:
    rows = [{"text": "x" * 3_000_000}, {"text": "small"}, {"text": "y" * 3_000_000}, {"text": "z" * 3_000_000}]
    manifest = ingest(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", block_bytes=1_000_000)
    assert [block.sample_count for block in manifest.blocks] == [1, 2, 1]
    assert all_rows(tmp_path / "out") == rows


def test_a_folder_of_formats_becomes_one_data_set(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    (raw / "inner").mkdir(parents=True)
    write_jsonl(raw / "a.jsonl", [{"text": "one"}, {"text": ""}])
    (raw / "b.txt").write_bytes(b"three\n\nfive")
    (raw / "inner" / "c.md").write_bytes(b"six\nis one\n")
    ingest(raw, tmp_path / "out", 2)
    texts = [row["text"] for row in all_rows(tmp_path / "out")]
    assert texts == ["one", "", "three", "", "five", "six\nis one\n"]

"""Every format at every size: no rows, one, as many as blocks hold and one more, and rows larger than any buffer."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from blocks.data import all_rows, damages
from penstock.blocks import BlockManager, ingest
from sources.making import PACKERS, arrow_file_of, arrow_stream_of, jsonl_of, parquet_of, tar_of, zip_of

BLOCK_SIZE = 6
WIDTH = 4
SCHEMA = pa.schema([("text", pa.string())])

Make = Callable[[list[str]], bytes]


def rows_of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def table_of(texts: list[str]) -> pa.Table:
    return pa.table({"text": texts}, schema=SCHEMA)


def quoted(texts: list[str]) -> bytes:
    """A column of quoted fields; tabs and commas alike."""
    return "".join(['"text"\r\n', *('"' + text.replace('"', '""') + '"\r\n' for text in texts)]).encode()


def halves(archive: Callable[[dict[str, bytes]], bytes], suffix: str, make: Make) -> Make:
    """An archive of two files."""
    return lambda texts: archive(
        {f"a.{suffix}": make(texts[: len(texts) // 2]), f"b.{suffix}": make(texts[len(texts) // 2 :])}
    )


def jsonl(texts: list[str]) -> bytes:
    return jsonl_of(rows_of(texts))


FORMATS: dict[str, Make] = {
    "rows.jsonl": jsonl,
    "rows.ndjson": jsonl,
    "crlf.jsonl": lambda texts: jsonl(texts).replace(b"\n", b"\r\n"),
    "blank.jsonl": lambda texts: b"\n" + jsonl(texts).replace(b"\n", b"\n \n\r\n"),
    "bom.jsonl": lambda texts: b"\xef\xbb\xbf" + jsonl(texts),
    "rows.json": lambda texts: orjson.dumps(rows_of(texts)),
    "pretty.json": lambda texts: orjson.dumps(rows_of(texts), option=orjson.OPT_INDENT_2),
    "bom.json": lambda texts: b"\xef\xbb\xbf" + orjson.dumps(rows_of(texts)),
    "rows.csv": quoted,
    "bom.csv": lambda texts: b"\xef\xbb\xbf" + quoted(texts),
    "rows.tsv": quoted,
    "rows.txt": lambda texts: "".join(f"{text}\n" for text in texts).encode(),
    "crlf.txt": lambda texts: "".join(f"{text}\r\n" for text in texts).encode(),
    "bom.txt": lambda texts: b"\xef\xbb\xbf" + "".join(f"{text}\n" for text in texts).encode(),
    "rows.parquet": lambda texts: parquet_of(table_of(texts), 4),
    "rows.arrow": lambda texts: arrow_file_of(table_of(texts), 4),
    "stream.arrow": lambda texts: arrow_stream_of(table_of(texts), 4),
    "rows.zip": halves(zip_of, "jsonl", jsonl),
    "rows.tar": halves(tar_of, "csv", quoted),
    "rows.tgz": lambda texts: PACKERS[".gz"](tar_of({"a.parquet": parquet_of(table_of(texts), 4)})),
    **{f"rows.jsonl{codec}": lambda texts, pack=pack: pack(jsonl(texts)) for codec, pack in PACKERS.items()},
    **{f"rows.csv{codec}": lambda texts, pack=pack: pack(quoted(texts)) for codec, pack in PACKERS.items()},
    "rows.parquet.gz": lambda texts: PACKERS[".gz"](parquet_of(table_of(texts), 4)),
}
COUNTS = [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 10 * BLOCK_SIZE]
ODD = ["words", "", "🦆 ünï 漢字 \u200d", 'a "quoted", word', "x" * 300, " spaces ", "a\ttab", "\u2028 \x85 \x0b"]


def texts_of(count: int) -> list[str]:
    return [f"{ODD[number % len(ODD)]}{number}" for number in range(count)]


def sizes(count: int) -> list[int]:
    return [BLOCK_SIZE] * (count // BLOCK_SIZE) + [count % BLOCK_SIZE] * (count % BLOCK_SIZE > 0)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FORMATS)
def test_any_number_of_rows_of_any_format_comes_back(tmp_path: Path, name: str, count: int) -> None:
    (tmp_path / name).write_bytes(FORMATS[name](texts_of(count)))
    manifest = ingest(tmp_path / name, tmp_path / "out", BLOCK_SIZE)
    assert [block.sample_count for block in manifest.blocks] == sizes(count)
    assert all_rows(tmp_path / "out") == rows_of(texts_of(count))
    assert damages(tmp_path / "out") == {}


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_rows_of_a_saved_data_set_comes_back(tmp_path: Path, count: int) -> None:
    save(table_of(texts_of(count)), tmp_path / "saved", shards=2 if count > 1 else 1)
    manifest = ingest(tmp_path / "saved", tmp_path / "out", BLOCK_SIZE)
    assert [block.sample_count for block in manifest.blocks] == sizes(count)
    assert all_rows(tmp_path / "out") == rows_of(texts_of(count))


@pytest.mark.parametrize("count", COUNTS[1:])
def test_any_number_of_whole_files_comes_back(tmp_path: Path, count: int) -> None:
    (tmp_path / "raw").mkdir()
    for number, text in enumerate(texts_of(count)):
        (tmp_path / f"raw/{number:03d}.md").write_bytes(text.encode())
    manifest = ingest(tmp_path / "raw", tmp_path / "out", BLOCK_SIZE)
    assert [block.sample_count for block in manifest.blocks] == sizes(count)
    assert [row["text"] for row in all_rows(tmp_path / "out")] == texts_of(count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["two.npy", "one.npy", "raw.bin", "raw.bin.gz", "two.npy.zst"])
def test_any_number_of_samples_of_tokens_comes_back(tmp_path: Path, name: str, count: int) -> None:
    ids = np.arange(count * WIDTH, dtype="<u2").reshape(count, WIDTH)
    data = npy_of(ids if name.startswith("two") else ids.reshape(-1)) if ".npy" in name else ids.tobytes()
    codec = Path(name).suffix
    (tmp_path / name).write_bytes(PACKERS[codec](data) if codec in PACKERS else data)
    manifest = ingest(tmp_path / name, tmp_path / "out", BLOCK_SIZE, tokens_per_sample=WIDTH)
    assert [block.sample_count for block in manifest.blocks] == sizes(count)
    assert [row["input_ids"] for row in all_rows(tmp_path / "out")] == ids.tolist()


def npy_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def save(table: pa.Table, folder: Path, shards: int = 1) -> None:
    """A folder as ``save_to_disk`` writes it."""
    folder.mkdir()
    size = -(-table.num_rows // shards)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(arrow_stream_of(table.slice(number * size, size), 4))
    (folder / "state.json").write_bytes(orjson.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_bytes(b"{}")


# Huge rows

HUGE = {name: make for name, make in FORMATS.items() if name not in ("blank.jsonl", "pretty.json")}
SIZES = [pytest.param(5_000_000, id="5 MB"), pytest.param(50_000_000, id="50 MB", marks=pytest.mark.soak)]


def huge(size_bytes: int) -> list[str]:
    """A small text, a huge one of letters of several lengths, and a small one."""
    piece = 'A "duck" (🦆) swims, and swims, and dives: ünï 漢字. '
    return ["before", (piece * (size_bytes // len(piece.encode()) + 1)), "after"]


def check_texts(dest: Path, texts: list[str]) -> None:
    manager = BlockManager(dest, dataset_chunk_size=1)
    for number, text in enumerate(texts):
        assert manager.get_rows(0, number)[0]["text"] == text, f"row {number} differs"


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("name", HUGE)
def test_a_huge_row_of_any_format_comes_back(tmp_path: Path, name: str, size_bytes: int) -> None:
    (tmp_path / name).write_bytes(HUGE[name](huge(size_bytes)))
    ingest(tmp_path / name, tmp_path / "out")
    check_texts(tmp_path / "out", huge(size_bytes))


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_huge_row_of_a_saved_data_set_comes_back(tmp_path: Path, size_bytes: int) -> None:
    save(table_of(huge(size_bytes)), tmp_path / "saved")
    ingest(tmp_path / "saved", tmp_path / "out")
    check_texts(tmp_path / "out", huge(size_bytes))


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("suffix", ["md", "txt", "py.gz"])
def test_a_huge_file_comes_back_as_one_row(tmp_path: Path, suffix: str, size_bytes: int) -> None:
    text = huge(size_bytes)[1].replace(". ", ".\r\n")
    data = text.encode()
    (tmp_path / f"a.{suffix}").write_bytes(PACKERS[".gz"](data) if suffix.endswith(".gz") else data)
    ingest(tmp_path / f"a.{suffix}", tmp_path / "out", whole_files=True)
    check_texts(tmp_path / "out", [text])


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("name", ["two.npy", "one.npy", "raw.bin", "two.npy.gz"])
def test_a_huge_sample_of_tokens_comes_back(tmp_path: Path, name: str, size_bytes: int) -> None:
    ids = (np.arange(size_bytes // 4) % 251).astype("<u4")
    data = npy_of(ids.reshape(1, -1) if name.startswith("two") else ids) if ".npy" in name else ids.tobytes()
    (tmp_path / name).write_bytes(PACKERS[".gz"](data) if name.endswith(".gz") else data)
    ingest(tmp_path / name, tmp_path / "out", tokens_per_sample=len(ids), token_dtype="uint32")
    (row,) = BlockManager(tmp_path / "out").get_rows(0, 0)
    assert np.array_equal(row["input_ids"], ids)

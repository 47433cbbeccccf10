"""Compressed files: what is inside goes by the suffix before; damage is told, never taken for the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from sources.making import PACKERS, Reading, error_of, jsonl_of
from sources.suite import RawRow
from sources.test_delimited import TestCsvSource as CsvSuite
from sources.test_json import TestArraySource as ArraySuite
from sources.test_jsonl import TestJsonlSource as JsonlSuite
from sources.test_text import TestTextLinesSource as TextSuite

ROWS = [{"text": f"row {number} {number * 7919 % 10007}", "id": number} for number in range(12_000)]
EACH = pytest.mark.parametrize("codec", sorted(PACKERS))


class TestGzJsonlSource(JsonlSuite):
    suffix = ".jsonl.gz"

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        return PACKERS[".gz"](super().file_of(rows, newline_at_end=newline_at_end))


class TestBz2CsvSource(CsvSuite):
    suffix = ".csv.bz2"

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        return PACKERS[".bz2"](super().file_of(rows, newline_at_end=newline_at_end))


class TestXzTextSource(TextSuite):
    suffix = ".txt.xz"

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        return PACKERS[".xz"](super().file_of(rows, newline_at_end=newline_at_end))


class TestZstJsonSource(ArraySuite):
    suffix = ".json.zst"

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        return PACKERS[".zst"](super().file_of(rows, newline_at_end=newline_at_end))


@EACH
def test_several_members_are_one_file(tmp_path: Path, codec: str) -> None:
    pack = PACKERS[codec]
    data = pack(b'{"a":1}\n{"a"') + pack(b"") + pack(b':2}\n{"a":3}\n')
    assert Reading(tmp_path, f"a.jsonl{codec}", data).values == [{"a": 1}, {"a": 2}, {"a": 3}]


@EACH
@pytest.mark.parametrize("count", [0, 1])
def test_a_file_may_hold_little_or_nothing(tmp_path: Path, codec: str, count: int) -> None:
    reading = Reading(tmp_path, f"a.jsonl{codec}", PACKERS[codec](jsonl_of(ROWS[:count])))
    assert (reading.values, reading.error) == (ROWS[:count], None)


@EACH
def test_a_file_cut_anywhere_is_told(tmp_path: Path, codec: str) -> None:
    data = PACKERS[codec](jsonl_of(ROWS[:20]))
    for size in range(len(data)):
        reading = Reading(tmp_path, f"a.jsonl{codec}", data[:size])
        assert reading.error is not None, f"cut at {size} of {len(data)}"
        assert reading.error.startswith(f"a.jsonl{codec}: cannot be read to its end")
        assert reading.values == ROWS[: len(reading.values)]


@pytest.mark.parametrize("form", ["jsonl", "csv", "json", "txt"])
@EACH
def test_the_rows_before_a_damage_come_out(tmp_path: Path, codec: str, form: str) -> None:
    texts = [row["text"] for row in ROWS]
    contents = {
        "jsonl": jsonl_of(ROWS),
        "csv": "\n".join(["text", *texts]).encode(),
        "json": b"[" + b",".join(jsonl_of(ROWS).splitlines()) + b"]",
        "txt": "\n".join(texts).encode(),
    }
    data = PACKERS[codec](contents[form])
    reading = Reading(tmp_path, f"a.{form}{codec}", data[: len(data) * 9 // 10])
    assert reading.error is not None
    assert len(reading.values) > 3_000
    assert [value["text"] for value in reading.values if value] == texts[: len(reading.values)]


@EACH
@pytest.mark.parametrize("behind", [b"garbage", b"\x1f\x8b garbage", b"BZh9garbage", b"\xfd7zXZ\0garbage"])
def test_what_follows_and_cannot_be_unpacked_is_told(tmp_path: Path, codec: str, behind: bytes) -> None:
    for data in (behind, PACKERS[codec](jsonl_of(ROWS[:20])) + behind):
        assert "damaged or truncated" in error_of(tmp_path, f"a.jsonl{codec}", data)


@pytest.mark.parametrize("codec", [".gz", ".bz2", ".xz"])
def test_a_flipped_bit_is_told(tmp_path: Path, codec: str) -> None:
    data = bytearray(PACKERS[codec](jsonl_of(ROWS[:200])))
    data[len(data) // 2] ^= 16
    error_of(tmp_path, f"a.jsonl{codec}", bytes(data))


def test_padding_behind_a_file_is_nothing(tmp_path: Path) -> None:
    for codec in (".gz", ".xz"):
        data = PACKERS[codec](jsonl_of(ROWS[:2])) + bytes(512)
        assert Reading(tmp_path, f"a.jsonl{codec}", data).values == ROWS[:2]

"""JSON files: an array or objects in a row, however laid out; a row laid out over lines becomes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import strategies as st

from penstock.sources import Cursor, open_source
from sources.making import Reading, bad_rows, error_of
from sources.suite import Event, RawRow, SourceSuite, rows_a_batch
from sources.test_jsonl import objects

TRICKY = ['{"a":"]}"}', '{"a":"\\""}', '{"a":"\\\\"}', '{"a":"\\u005d\\\\\\""}', '{"a":[[{"b":"["}],{}]}', '{"[":{}}']
BAD = ["17", "null", "true", '"a ] \\" string"', "[1,[2]]", "[]", '{"a":NaN}', '{"a":1]', '{"a" 1}', "nonsense"]

good_rows = st.builds(lambda value: RawRow(orjson.dumps(value), value), objects) | st.sampled_from(
    [RawRow(raw.encode(), orjson.loads(raw)) for raw in TRICKY]
)
bad_rows_ = st.sampled_from([RawRow(raw.encode(), None) for raw in BAD] + [RawRow(b'{"a":"\xff"}', None)])


class TestArraySource(SourceSuite):
    suffix = ".json"
    begin, between, end = b"[", b",", b"]"

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        return st.lists(good_rows | bad_rows_, max_size=5)

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        content = self.begin + self.between.join(row.raw for row in rows) + self.end
        return content + b"\n" if newline_at_end else content


class TestPrettyArraySource(TestArraySource):
    begin, between, end = b"\xef\xbb\xbf \r\n[\n  ", b"  ,\r\n  ", b"\n]\n\n"

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        pretty = st.builds(lambda value: RawRow(orjson.dumps(value, option=orjson.OPT_INDENT_2), value), objects)
        return st.lists(pretty | bad_rows_, max_size=5)


class TestConcatenatedSource(TestArraySource):
    begin, between, end = b"", b"\n ", b""

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        # What begins with a bracket is an array.
        return super().rows().filter(lambda rows: not (rows and rows[0].raw.startswith(b"[")))


def lines_of(tmp_path: Path, data: bytes) -> list[bytes]:
    (tmp_path / "a.json").write_bytes(data)
    return [line for batch in open_source(tmp_path / "a.json").batches(Cursor()) for line in batch.lines]


def test_a_row_of_one_line_is_stored_byte_for_byte(tmp_path: Path) -> None:
    row = b'{ "b":1.10,  "a":"\\u00e9", "big":123456789012345678901234567890}'
    assert lines_of(tmp_path, b"[" + row + b" ,\n" + row + b"]") == [row + b"\n"] * 2


def test_a_row_of_several_lines_loses_its_line_breaks_and_nothing_else(tmp_path: Path) -> None:
    row = b'{\r\n  "b": 1.10,\n\t"a": "x \\n  y",\n  "big": 123456789012345678901234567890\n}'
    stored = b'{"b": 1.10,"a": "x \\n  y","big": 123456789012345678901234567890}\n'
    assert lines_of(tmp_path, b"[" + row + b"]") == [stored]


@pytest.mark.parametrize("row", TRICKY)
def test_brackets_and_quotes_inside_strings_are_text_wherever_a_read_ends(tmp_path: Path, row: str) -> None:
    for read_bytes in (1, 2, 3, 5):
        with rows_a_batch(read_bytes):
            assert Reading(tmp_path, "a.json", f"[{row},{row}]".encode()).values == [orjson.loads(row)] * 2
            assert Reading(tmp_path, "a.json", f"{row}{row}".encode()).values == [orjson.loads(row)] * 2


@pytest.mark.parametrize("data", [b"", b" \n", b"\xef\xbb\xbf", b"[]", b" [ ]\n", b"\xef\xbb\xbf[\r\n]"])
def test_a_file_of_nothing_has_no_rows(tmp_path: Path, data: bytes) -> None:
    reading = Reading(tmp_path, "a.json", data)
    assert (reading.events, reading.error) == ([], None)


def test_an_array_is_one_however_far_down_it_begins(tmp_path: Path) -> None:
    assert Reading(tmp_path, "a.json", b" \n" * 500 + b'[{"a":1}]').values == [{"a": 1}]


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 3000])
def test_every_row_comes_once_whatever_their_number(tmp_path: Path, count: int) -> None:
    rows = [{"id": number} for number in range(count)]
    with rows_a_batch(4096):
        reading = Reading(tmp_path, "a.json", orjson.dumps(rows))
    assert reading.events == [Event(f"a.json:{number}", row) for number, row in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("raw", "kind"),
    [("[1]", "array"), ('"a"', "string"), ("1.5", "number"), ("-17", "number"), ("false", "boolean"), ("null", "null")],
)
def test_what_is_no_object_is_a_bad_row_and_named(tmp_path: Path, raw: str, kind: str) -> None:
    (bad,) = bad_rows(tmp_path, "a.json", f'[{{"a":1}},{raw},{{"a":2}}]'.encode())
    assert (bad.position, bad.reason) == ("a.json:2", f"a JSON {kind}, expected an object")


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", '"\\ud800"', "1e999x"])
def test_what_json_does_not_have_is_a_bad_row(tmp_path: Path, raw: str) -> None:
    (bad,) = bad_rows(tmp_path, "a.json", f'[{{"a":{raw}}},{{"a":2}}]'.encode())
    assert bad.reason.startswith("not JSON")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'[{"a":1},{"a":2}', "ends before its array does: it is truncated"),
        (b'[{"a":1},{"a":2},', "ends before its array does: it is truncated"),
        (b'[{"a":1},{"a":2},{"a":', "ends in the middle of the value at byte 17"),
        (b'[{"a":1},{"a":2},{"a":"x', "ends in the middle of the value at byte 17"),
        (b'{"a":1}{"a":2}{"a":"x\\', "ends in the middle of the value at byte 14"),
        (b'[{"a":1},{"a":2}] x', "something follows its array at byte 18"),
        (b'[{"a":1},{"a":2}][]', "something follows its array at byte 17"),
        (b'{"a":1}{"a":2}]', "the ] at byte 14 closes nothing"),
    ],
)
def test_a_wrong_end_is_told_behind_the_rows_before_it(tmp_path: Path, data: bytes, reason: str) -> None:
    reading = Reading(tmp_path, "a.json", data)
    assert reading.values == [{"a": 1}, {"a": 2}]
    assert reading.error is not None
    assert reading.error.startswith("a.json")
    assert reason in reading.error


def test_a_bracket_that_is_never_closed_is_told(tmp_path: Path) -> None:
    assert "it is truncated" in error_of(tmp_path, "a.json", b'[{"a":[1},{"a":2}]')


def test_long_rows_are_one_row_each(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 'x"\n' * (1 << 19)}, {"a": 1}, {"a": [["]\\" * (1 << 20)]]}]
    assert Reading(tmp_path, "a.json", orjson.dumps(rows)).values == rows

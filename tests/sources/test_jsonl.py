"""JSON lines: an object a line, stored as it was; anything else is a bad row; blank lines are nothing."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.sources import Cursor, open_source
from sources.suite import Event, RawRow, SourceSuite, events

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=5))
objects = st.dictionaries(st.text(max_size=3), scalars | st.lists(scalars, max_size=2), max_size=3)
around = st.sampled_from([(b"", b""), (b" ", b"\t"), (b"", b"\r"), (b"\t", b"  \r")])

BAD = [
    b"{",
    b"nonsense",
    b"[1]",
    b'"text"',
    b"17",
    b"null",
    b"true",
    b'{"a":NaN}',
    b'{"a":"\xff"}',
    b"{}{}",
    b"\xef\xbb\xbf{}",
]
BLANK = [b"", b" ", b"\t ", b"\r"]

good_rows = st.builds(lambda value, space: RawRow(space[0] + orjson.dumps(value) + space[1], value), objects, around)
bad_rows = st.sampled_from([RawRow(raw, None) for raw in BAD])
blank_rows = st.sampled_from([RawRow(raw, None, counts=False) for raw in BLANK])


class TestJsonlSource(SourceSuite):
    suffix = ".jsonl"

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        # A leading BOM is no part of the first row, so the first row does not begin with one.
        return st.lists(good_rows | bad_rows | blank_rows, max_size=7).filter(
            lambda rows: not (rows and rows[0].raw.startswith(b"\xef\xbb\xbf"))
        )

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        content = b"\n".join(row.raw for row in rows)
        return content + b"\n" if newline_at_end and rows else content


def read_one(tmp_path: Path, content: bytes) -> list[Event]:
    (tmp_path / "a.jsonl").write_bytes(content)
    return events(open_source(tmp_path / "a.jsonl"))


def reason(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "a.jsonl").write_bytes(content)
    (batch,) = open_source(tmp_path / "a.jsonl").batches(Cursor())
    (bad,) = batch.bad
    return bad.reason


def test_a_row_is_stored_byte_for_byte(tmp_path: Path) -> None:
    line = b'{ "b":1.10,  "a":"\\u00e9", "big":123456789012345678901234567890}'
    (tmp_path / "a.jsonl").write_bytes(b"  " + line + b" \r\n")
    (batch,) = open_source(tmp_path / "a.jsonl").batches(Cursor())
    assert batch.lines == [line + b"\n"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_end_as_they_do_on_any_system(tmp_path: Path, end: bytes) -> None:
    assert read_one(tmp_path, b'{"a":1}' + end + b'{"a":2}' + end) == [
        Event("a.jsonl:1", {"a": 1}),
        Event("a.jsonl:2", {"a": 2}),
    ]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert read_one(tmp_path, b'{"a":1}\n{"a":2}') == [Event("a.jsonl:1", {"a": 1}), Event("a.jsonl:2", {"a": 2})]


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    assert read_one(tmp_path, b'\xef\xbb\xbf{"a":1}\n') == [Event("a.jsonl:1", {"a": 1})]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b" \r\n"])
def test_a_file_of_nothing_has_no_rows(tmp_path: Path, content: bytes) -> None:
    assert read_one(tmp_path, content) == []


def test_blank_lines_are_nothing_but_count_in_positions(tmp_path: Path) -> None:
    assert read_one(tmp_path, b'\n{"a":1}\n\n \r\n?\n') == [Event("a.jsonl:2", {"a": 1}), Event("a.jsonl:5", None)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_bad_rows(tmp_path: Path, number: str) -> None:
    assert "not JSON" in reason(tmp_path, b'{"a":%s}\n' % number.encode())


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00", "\\udc00\\ud800", "x\\ud800y"])
def test_half_a_surrogate_pair_is_a_bad_row(tmp_path: Path, escape: str) -> None:
    assert "not JSON" in reason(tmp_path, b'{"a":"%s"}\n' % escape.encode())


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert read_one(tmp_path, b'{"a":"\\ud83d\\ude00"}\n') == [Event("a.jsonl:1", {"a": "\U0001f600"})]


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
def test_what_is_not_utf8_is_a_bad_row(tmp_path: Path, raw: bytes) -> None:
    assert "not UTF-8" in reason(tmp_path, b'{"a":"%s"}\n' % raw)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"[1]", "array"),
        (b'"a"', "string"),
        (b"1.5", "number"),
        (b"17", "number"),
        (b"false", "boolean"),
        (b"null", "null"),
    ],
)
def test_what_is_no_object_is_a_bad_row_and_named(tmp_path: Path, raw: bytes, kind: str) -> None:
    assert reason(tmp_path, raw + b"\n") == f"a JSON {kind}, expected an object"


def test_nesting_beyond_all_reason_is_a_bad_row(tmp_path: Path) -> None:
    assert "not JSON" in reason(tmp_path, b'{"a":' + b"[" * 100_000 + b"\n")


def test_a_row_longer_than_a_batch_is_one_row(tmp_path: Path) -> None:
    text = "x" * (5 << 20)
    rows = [{"a": 1}, {"a": text}, {"a": 3}]
    came = read_one(tmp_path, b"\n".join(map(orjson.dumps, rows)))
    assert came == [Event(f"a.jsonl:{number}", row) for number, row in enumerate(rows, 1)]


def test_a_file_that_became_shorter_cannot_be_resumed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n{}\n{}\n")
    source = open_source(file)
    (batch,) = source.batches(Cursor())
    cursor = batch.cursor_after(3)
    file.write_bytes(b"{}\n")
    with pytest.raises(SourceError, match=r"a\.jsonl.* 2 rows before"):
        events(source, cursor)

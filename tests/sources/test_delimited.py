"""CSV and TSV: a header, then strings; a row is named by the line it begins at."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import strategies as st

from penstock.sources import delimited
from sources.making import Reading, bad_rows, error_of
from sources.suite import Event, RawRow, SourceSuite, rows_a_batch

texts = st.text(st.sampled_from('aé",\t\n\r; '), max_size=5)


def written(fields: list[str], delimiter: str) -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator="\r\n").writerow(fields)
    return file.getvalue().removesuffix("\r\n").encode()


class TestCsvSource(SourceSuite):
    suffix = ".csv"
    delimiter = ","

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        good = st.builds(lambda a, b: RawRow(written([a, b], self.delimiter), {"a": a, "b": b}), texts, texts)
        between = self.delimiter.encode()
        broken = [b"1", between.join([b"1", b"2", b"3"]), b'"1"2' + between + b"3", b"\xff" + between, b" "]
        bad = st.sampled_from([RawRow(raw, None) for raw in broken])
        blank = st.sampled_from([RawRow(raw, None, counts=False) for raw in (b"", b"\r")])
        return st.lists(good | bad | blank, max_size=5)

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        content = b"\n".join([b"a" + self.delimiter.encode() + b"b", *(row.raw for row in rows)])
        return content + b"\n" if newline_at_end else content

    def positions(self, name: str, rows: list[RawRow]) -> list[str]:
        breaks = [sum(row.raw.count(b"\n") for row in rows[:index]) for index in range(len(rows))]
        return [f"{name}:{index + 2 + above}" for index, above in enumerate(breaks)]


class TestTsvSource(TestCsvSource):
    suffix = ".tsv"
    delimiter = "\t"


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\n\r\n", b"a,b", b"a,b\n", b"\xef\xbb\xbfa,b\r\n\r\n"])
def test_a_file_of_no_more_than_a_header_has_no_rows(tmp_path: Path, data: bytes) -> None:
    reading = Reading(tmp_path, "a.csv", data)
    assert (reading.events, reading.error) == ([], None)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a,b\n1,2\n3,4", [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]),
        (b"a,b\r\n1,2\r\n\r\n3,4\r\n", [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]),
        (b"\xef\xbb\xbfa,b\n1,2\n", [{"a": "1", "b": "2"}]),
        (b'\xef\xbb\xbf"a","b"\n1,2\n', [{"a": "1", "b": "2"}]),
        (b"\n\na,b\n1,2\n", [{"a": "1", "b": "2"}]),
        (b'a,b\n"x, ""y""\n\nz",\n', [{"a": 'x, "y"\n\nz', "b": ""}]),
        (b'"a\nb",c\n1,2\n', [{"a\nb": "1", "c": "2"}]),
        (b"a,\n1,2\n", [{"a": "1", "": "2"}]),
        (b"a\n007\nNaN\n 1 \n", [{"a": "007"}, {"a": "NaN"}, {"a": " 1 "}]),
        (b'a,b\nit"s,2\n', [{"a": 'it"s', "b": "2"}]),
        (b"a\n\0\n", [{"a": "\0"}]),
    ],
)
def test_values_are_strings_as_they_stand_in_the_file(
    tmp_path: Path, data: bytes, expected: list[dict[str, str]]
) -> None:
    assert Reading(tmp_path, "a.csv", data).values == expected


def test_commas_are_text_in_tsv(tmp_path: Path) -> None:
    assert Reading(tmp_path, "a.tsv", b"a\tb\n1,5\t2\n").values == [{"a": "1,5", "b": "2"}]


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 3000])
def test_every_row_comes_once_whatever_their_number(tmp_path: Path, count: int) -> None:
    with rows_a_batch(4096):
        reading = Reading(tmp_path, "a.csv", b"id\n" + b"".join(b"%d\n" % number for number in range(count)))
    assert reading.events == [Event(f"a.csv:{number + 2}", {"id": str(number)}) for number in range(count)]


def test_a_bad_row_is_named_by_the_line_it_begins_at(tmp_path: Path) -> None:
    data = b'a,b\n"1\n1",2\n\n1\n1,2,3\n"x"y,2\nol\xe9,2\nfine,2\n'
    assert [(row.position, row.reason, row.before) for row in bad_rows(tmp_path, "a.csv", data)] == [
        ("a.csv:5", "1 fields, expected 2", 1),
        ("a.csv:6", "3 fields, expected 2", 1),
        ("a.csv:7", "not CSV: ',' expected after '\"'", 1),
        ("a.csv:8", "not UTF-8", 1),
    ]


def test_a_quote_that_is_never_closed_is_told_behind_the_rows_before_it(tmp_path: Path) -> None:
    reading = Reading(tmp_path, "a.csv", b'a,b\n1,2\n"3,4\n5,6\n7,8\n')
    assert reading.values == [{"a": "1", "b": "2"}]
    assert reading.error is not None
    assert "a.csv:3: a quote in this row is never closed" in reading.error


def test_such_a_quote_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_FIELD_CHARACTERS", 1000)
    before = csv.field_size_limit(1000)
    try:
        error = error_of(tmp_path, "a.csv", b'a,b\n1,2\n"3,4\n' + b"5,6\n" * 5000)
    finally:
        csv.field_size_limit(before)
    assert "a.csv:3: a quote in this row is never closed" in error


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"a,b,a", "names a column twice: 'a': rename one of them"),
        (b"a,,", "names a column twice: ''"),
        (b'"a', "header cannot be read"),
        (b"a\rb\rc", "header cannot be read"),
        (b"a\xff,b", "not UTF-8"),
    ],
)
def test_a_header_that_cannot_be_used_is_told(tmp_path: Path, header: bytes, reason: str) -> None:
    assert reason in error_of(tmp_path, "a.csv", header + b"\n1,2,3\n")


def test_a_long_row_is_one_row(tmp_path: Path) -> None:
    text = 'x, "y"\n' * (1 << 19)
    data = b"a,b\n" + written([text, "1"], ",") + b"\n3,4"
    assert Reading(tmp_path, "a.csv", data).values == [{"a": text, "b": "1"}, {"a": "3", "b": "4"}]

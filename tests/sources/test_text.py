"""Plain text: a line a sample in .txt, where a blank line is one too; a whole file a sample elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from penstock.sources import Cursor, open_source
from sources.suite import Event, RawRow, SourceSuite, events

BOM = b"\xef\xbb\xbf"

texts = st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=("Cs",)), max_size=6)
good_texts = st.builds(lambda text: RawRow(text.encode(), {"text": text}), texts)
bad_texts = st.sampled_from([RawRow(raw, None) for raw in (b"\xff", b"ok \xc3", b"\xed\xa0\x80")])


class TestTextLinesSource(SourceSuite):
    suffix = ".txt"

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        return st.lists(good_texts | bad_texts, max_size=7)

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        content = b"\n".join(row.raw for row in rows)
        # Without a newline an empty last line is no line.
        return content + b"\n" if rows and (newline_at_end or not rows[-1].raw) else content


class TestWholeFileSource(SourceSuite):
    suffix = ".md"

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        return st.lists(good_texts | bad_texts, min_size=1, max_size=1)

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        return rows[0].raw

    def positions(self, name: str, rows: list[RawRow]) -> list[str]:
        return [name] * len(rows)

    def value_of(self, row: RawRow, name: str) -> dict[str, Any] | None:
        return {**row.value, "path": name} if row.value is not None else None


def texts_of(tmp_path: Path, content: bytes) -> list[str]:
    (tmp_path / "a.txt").write_bytes(content)
    return [event.value["text"] for event in events(open_source(tmp_path / "a.txt")) if event.value is not None]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (BOM, []),
        (b"\n", [""]),
        (BOM + b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"\n\na", ["", "", "a"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\n\r\nb", ["a", "", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"  a \n", ["  a "]),
        (BOM + b"a\n" + BOM + b"b\n", ["a", "\ufeffb"]),
        ("é\u2028\x0c\x85\n".encode(), ["é\u2028\x0c\x85"]),
    ],
)
def test_a_line_is_a_sample_and_a_blank_one_too(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    assert texts_of(tmp_path, content) == expected


def test_what_is_not_utf8_is_named_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nol\xe9\n")
    (batch,) = open_source(tmp_path / "a.txt").batches(Cursor())
    (bad,) = batch.bad
    assert (bad.position, bad.reason, bad.before) == ("a.txt:2", "not UTF-8: byte 0xe9 at offset 2", 1)


@pytest.mark.parametrize("suffix", [".md", ".py", ".rst", ".MD"])
def test_a_whole_file_is_a_sample_with_its_path(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / f"a{suffix}").write_bytes(BOM + b"one\r\n\ntwo")
    (tmp_path / f"b{suffix}").write_bytes(b"")
    assert events(open_source(tmp_path)) == [
        Event(f"b{suffix}", {"text": "", "path": f"b{suffix}"}),
        Event(f"inner/a{suffix}", {"text": "one\r\n\ntwo", "path": f"inner/a{suffix}"}),
    ]

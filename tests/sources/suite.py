"""What every source promises: subclass `SourceSuite` and say how rows become files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.sources import Cursor, Source, columnar, json_values, open_source, where
from penstock.sources import lines as lines_module

# One suite, many subclasses: that they share their failing examples does no harm.
examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it stands in a file, and what has to become of it."""

    raw: bytes
    value: dict[str, Any] | None
    """What it has to be read as; None for a bad row."""
    counts: bool = True
    """Whether it is a row at all; a blank line may be none."""


@dataclass(frozen=True, slots=True)
class Event:
    """A row as it came out of a source: good with its value, or bad with none."""

    position: str
    value: dict[str, Any] | None


def read(source: Source, cursor: Cursor | None = None) -> Iterator[tuple[Event, Cursor | None]]:
    """Every row from a cursor on, in order; behind a good one the cursor to go on from."""
    for batch in source.batches(cursor or Cursor()):
        assert len(batch.lines) == len(batch.values) == len(batch.numbers)
        bad = list(batch.bad)
        for good in range(len(batch.lines) + 1):
            while bad and bad[0].before == good:
                assert bad[0].reason
                yield Event(bad.pop(0).position, None), None
            if good < len(batch.lines):
                assert batch.lines[good].count(b"\n") == 1
                assert batch.lines[good].endswith(b"}\n")
                assert orjson.loads(batch.lines[good]) == batch.values[good]
                position = where(batch.file_name, batch.numbers[good])
                yield Event(position, batch.values[good]), batch.cursor_after(good + 1)
        assert bad == [], "bad rows come in the order of the good ones they lie between"


def events(source: Source, cursor: Cursor | None = None) -> list[Event]:
    return [event for event, _ in read(source, cursor)]


@contextmanager
def rows_a_batch(group_bytes: int) -> Iterator[None]:
    """Batches as short as a line, so that a few rows are many batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "GROUP_BYTES", group_bytes)
        patch.setattr(json_values, "_READ_BYTES", group_bytes)
        patch.setattr(columnar, "BATCH_ROWS", {1: 1, 20: 2}.get(group_bytes, columnar.BATCH_ROWS))
        yield


class SourceSuite:
    suffix: str
    """Of the files this suite writes."""

    def rows(self) -> st.SearchStrategy[list[RawRow]]:
        """The rows of one file."""
        raise NotImplementedError

    def file_of(self, rows: list[RawRow], *, newline_at_end: bool) -> bytes:
        """A file with these rows."""
        raise NotImplementedError

    def positions(self, name: str, rows: list[RawRow]) -> list[str]:
        """How an error names each of the raw rows of a file."""
        return [f"{name}:{index + 1}" for index in range(len(rows))]

    def events_of(self, name: str, rows: list[RawRow]) -> list[Event]:
        """What has to come out of a file with these rows."""
        positions = self.positions(name, rows)
        return [
            Event(position, self.value_of(row, name))
            for position, row in zip(positions, rows, strict=True)
            if row.counts
        ]

    @contextmanager
    def source_of(self, files: list[list[RawRow]], newline_at_end: bool) -> Iterator[tuple[str, list[Event]]]:
        """A source with these files, and what has to come out of it."""
        expected = []
        with TemporaryDirectory() as folder:
            for number, rows in enumerate(files):
                name = f"{number:03d}{self.suffix}"
                Path(folder, name).write_bytes(self.file_of(rows, newline_at_end=newline_at_end))
                expected += self.events_of(name, rows)
            yield folder, expected

    def value_of(self, row: RawRow, name: str) -> dict[str, Any] | None:
        return row.value

    @examples
    @given(data=st.data(), newline_at_end=st.booleans(), group_bytes=st.sampled_from([1, 20, 1 << 20]))
    def test_every_row_comes_out_once_in_order_and_can_be_resumed_after(
        self, data: st.DataObject, newline_at_end: bool, group_bytes: int
    ) -> None:
        files = data.draw(st.lists(self.rows(), min_size=1, max_size=3))
        with self.source_of(files, newline_at_end) as (spec, expected), rows_a_batch(group_bytes):
            source = open_source(spec)
            came = list(read(source))
            assert [event for event, _ in came] == expected
            for index, (_, cursor) in enumerate(came):
                if cursor is not None:
                    stored = Cursor(**orjson.loads(orjson.dumps(cursor.as_dict())))
                    assert events(open_source(spec), stored) == expected[index + 1 :]

    @examples
    @given(data=st.data(), first=st.sampled_from([1, 20, 1 << 20]), then=st.sampled_from([1, 20, 1 << 20]))
    def test_a_resumed_source_can_be_resumed_again(self, data: st.DataObject, first: int, then: int) -> None:
        files = data.draw(st.lists(self.rows(), min_size=1, max_size=2))
        with self.source_of(files, newline_at_end=True) as (spec, expected):
            with rows_a_batch(first):
                resumable = [cursor for _, cursor in read(open_source(spec)) if cursor is not None]
            for begin in resumable:
                with rows_a_batch(then):
                    rest = list(read(open_source(spec), begin))
                    for index, (_, cursor) in enumerate(rest):
                        if cursor is not None:
                            place = len(expected) - len(rest) + index + 1
                            assert events(open_source(spec), cursor) == expected[place:]

    @examples
    @given(data=st.data())
    def test_the_same_files_are_the_same_source(self, data: st.DataObject) -> None:
        files = data.draw(st.lists(self.rows(), min_size=1, max_size=3))
        with self.source_of(files, True) as (spec, _), self.source_of(files, True) as (other, _):
            assert open_source(spec).revision() == open_source(other).revision()
            assert events(open_source(spec)) == events(open_source(other)) == events(open_source(spec))

    @examples
    @given(data=st.data(), group_bytes=st.sampled_from([1, 20, 1 << 20]))
    def test_progress_never_goes_back_and_ends_within_the_size(self, data: st.DataObject, group_bytes: int) -> None:
        files = data.draw(st.lists(self.rows(), min_size=1, max_size=3))
        with self.source_of(files, newline_at_end=True) as (spec, _), rows_a_batch(group_bytes):
            source = open_source(spec)
            size_bytes = sum(path.stat().st_size for path in Path(spec).iterdir())
            assert source.size_bytes() == size_bytes
            passed = [source.position_bytes(cursor) or 0 for _, cursor in read(source) if cursor is not None]
            assert passed == sorted(passed)
            assert all(0 <= position <= size_bytes for position in passed)

    def test_a_changed_file_is_a_changed_source(self, tmp_path: Path) -> None:
        file = tmp_path / f"a{self.suffix}"
        seen = []
        for content in (b"{}\n", b"[]\n", b"{}\n{}\n", b"{}", b""):
            file.write_bytes(content)
            seen.append(open_source(tmp_path).revision())
        file.rename(tmp_path / f"b{self.suffix}")
        seen.append(open_source(tmp_path).revision())
        (tmp_path / f"c{self.suffix}").write_bytes(b"")
        seen.append(open_source(tmp_path).revision())
        assert all(one != other for index, one in enumerate(seen) for other in seen[:index])

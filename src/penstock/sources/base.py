"""The source contract: rows in a fixed order, with a cursor to go on from and a position to name in errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from penstock.errors import SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in a source from which reading can go on. Small, JSON, meaningful only to the source that made it."""

    file: int = 0
    """Which of the source's files, in its order."""
    member: int = 0
    """Which member of that file, where it is an archive."""
    offset: int = 0
    """Where to start in that file, in the reader's own unit (bytes for line formats)."""
    row: int = 0
    """Raw rows of that file before `offset`, to number rows in errors."""
    skip: int = 0
    """Rows after `offset`, good or bad, that were taken already."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def plus(self, rows: int) -> Cursor:
        return replace(self, skip=self.skip + rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used, and why."""

    before: int
    """How many good rows of its batch come before it."""
    position: str
    """File and row, as a person would look for it: ``data/a.jsonl:17``."""
    reason: str


@dataclass(slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows: a few hundred or thousand at a time, so that the cost per row stays below Python's notice."""

    file_name: str
    start: Cursor
    """Reading again from here gives these rows again, then the rest."""
    values: list[dict[str, Any]] = field(default_factory=list)
    """The good rows, parsed."""
    lines: list[bytes] = field(default_factory=list)
    """The good rows as a block stores them: one JSON object and a newline each."""
    numbers: list[int] = field(default_factory=list)
    """The good rows' numbers in their file, counted from 1 as editors do; 0 stands for the whole file."""
    bad: list[BadRow] = field(default_factory=list)

    def cursor_after(self, good: int) -> Cursor:
        """Where to go on after the first `good` good rows and the bad ones before them."""
        return self.start.plus(good + sum(1 for row in self.bad if row.before < good))


def where(file_name: str, number: int) -> str:
    """A row's position as a person would look for it; number 0 is the whole file."""
    return f"{file_name}:{number}" if number else file_name


def refuse_unless_utf8(name: str) -> None:
    """Names end up in the manifest, which is JSON: a name that is not UTF-8 cannot be told there."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"{name!r}: the name is not UTF-8: rename it") from None


class Source(Protocol):
    """Rows in a fixed order.

    Ordering: the same source gives the same rows in the same order, on every machine. Resume: `batches(cursor)` with a
    cursor from `RowBatch.cursor_after` gives exactly the rows that follow, at the cost of a seek (or of reading up to
    there again, where a format cannot seek). Failures: `SourceError` naming the file; a bad row is no failure but an
    entry in its batch; a read error is never taken for the end. Not safe for several threads; open one each.
    """

    @property
    def spec(self) -> str:
        """The source as the user wrote it."""
        ...

    @property
    def name(self) -> str:
        """A short name for the data set made of it."""
        ...

    @property
    def pinned(self) -> str | None:
        """The version being read, where the spec alone would mean another one tomorrow: a Hub repository's commit."""
        ...

    def stamp(self, first: int, last: int) -> str | None:
        """Another one whenever one of the files from the first-th to the last-th was written since it was read: what
        `revision` cannot see without reading all of them. None where files cannot change."""
        ...

    def revision(self) -> dict[str, Any]:
        """What identifies this very content without reading all of it; JSON."""
        ...

    def batches(self, cursor: Cursor) -> Iterator[RowBatch]:
        """Rows from `cursor` to the end."""
        ...

    def size_bytes(self) -> int | None:
        """How much there is to read, for progress; None where unknown."""
        ...

    def position_bytes(self, cursor: Cursor) -> int | None:
        """How much of `size_bytes` lies before `cursor`."""
        ...

"""Some rows of one Parquet column: only the data pages that hold them are kept, decompressed and decoded.

    column chunk of a row group:   [dictionary page] [data page] [data page] ...     each with a small header
    what is kept of several:       a Parquet file of that one column, in memory ──► pyarrow

A row group is what one must read whole by pyarrow's own means, and it is often ten times a page or more, or a thousand
times. Headers say how many rows each data page has, so whoever walks along them knows which to take, and may remember
it. Columns inside lists have rows of several values and are refused before it comes to this.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import SourceError
from penstock.pages.thrift import I64, NotWhole, read_struct, write_struct

_MAGIC = b"PAR1"
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_BYTE_ARRAY, _UTF8 = 6, 0
_ENCODINGS = [0, 2, 3, 4, 5, 6, 7, 8, 9]
"""All there are: a reader goes by the pages' own."""
_BY_DICTIONARY = (2, 8)
_OPTIONAL = 1
_CODECS = {
    "UNCOMPRESSED": 0,
    "SNAPPY": 1,
    "GZIP": 2,
    "LZO": 3,
    "BROTLI": 4,
    "LZ4": 5,
    "ZSTD": 6,
    "LZ4_RAW": 7,
}
_LARGEST_PAGE_BYTES = 1 << 30
_HEADER_BYTES = 256
"""What a header takes, about; one with long statistics takes more."""


@dataclass(frozen=True, slots=True)
class TakenPages:
    """Data pages of one column chunk that hold some rows."""

    pages: tuple[memoryview, ...]
    """Whole pages, headers included: the dictionary, where it is needed, then data pages that follow each other."""
    has_dictionary: bool
    row_count: int
    """Rows of these pages,"""
    skip: int
    """of which the first are not wanted."""
    wanted: int


@dataclass(frozen=True, slots=True)
class FoundPages:
    """Where they are, in bytes of the chunk; the rest as `TakenPages` has it."""

    dictionary: tuple[int, int] | None
    data: tuple[int, int]
    row_count: int
    skip: int
    wanted: int


Give = Callable[[int, int], memoryview]
"""Bytes of a column chunk from a place on: so many, or more, or what there is to its end."""


class PagePlaces:
    """Where the data pages of a column chunk are, as far as somebody has walked along it. Not safe for threads."""

    def __init__(self, found: np.ndarray | None = None) -> None:
        """Begin before the first page, or where an earlier walk ended; see `as_array`."""
        self._rows, self._at, self._coded = ([] if found is None else found[1:-1, place].tolist() for place in range(3))
        begin = (0, 0, 0) if found is None else found[0].tolist()
        end = (0, 0, 0) if found is None else found[-1].tolist()
        self._dictionary = begin[0], begin[1]
        """From where to where; nothing where there is none."""
        self._row, self._next = end[0], end[1]
        """The first row, and the first byte, that nobody has walked along yet."""

    def as_array(self) -> np.ndarray:
        pages = zip(self._rows, self._at, self._coded, strict=True)
        return np.array([(*self._dictionary, 0), *pages, (self._row, self._next, 0)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def walk(self, give: Give, size: int, until: int, what: str) -> None:
        """Find the pages up to row `until`.

        Args:
            give: Bytes of the chunk.
            size: How many it has.
            until: The row behind the last that is wanted, counted from the chunk's own first.
            what: The chunk, for messages.
        """
        while self._row < until:
            at = self._next
            if at >= size:
                raise SourceError(
                    f"{what} has {self._row} rows in its data pages, expected {until} or more: it is damaged"
                )
            header, stop = _header(give, at, size, what)
            kind = header.get(1)
            if kind == _DICTIONARY:
                if self._dictionary[1] or self._rows:
                    raise SourceError(f"{what} has a dictionary where none belongs: it is damaged")
                self._dictionary = at, stop
            elif kind in (_DATA, _DATA_V2):
                count, coded = _data_page(header, kind, what)
                if count:
                    self._rows.append(self._row)
                    self._at.append(at)
                    self._coded.append(coded)
                    self._row += count
            elif kind != _INDEX:
                raise SourceError(f"{what} has a page of an unknown kind ({kind}) at byte {at} of it: it is damaged")
            self._next = stop

    def find(self, first: int, last: int, what: str) -> FoundPages:
        """Which bytes hold rows ``[first, last)``; they were walked along before."""
        begin, end = bisect_right(self._rows, first) - 1, bisect_left(self._rows, last)
        bounds = [*self._at, self._next]
        stop_row = self._rows[end] if end < len(self._rows) else self._row
        coded = any(self._coded[begin:end])
        if coded and not self._dictionary[1]:
            raise SourceError(f"{what} has data pages with a dictionary, and none: it is damaged")
        return FoundPages(
            self._dictionary if coded else None,
            (bounds[begin], bounds[end]),
            stop_row - self._rows[begin],
            first - self._rows[begin],
            last - first,
        )

    @classmethod
    def from_index(cls, data: bytes, start: int, has_dictionary: bool, rows: int, what: str) -> PagePlaces:
        """All pages of a chunk by its offset index, which some writers put beside the footer.

        Args:
            data: The index.
            start: Where the chunk begins in its file.
            has_dictionary: Whether it begins with one; all pages are then taken to use it.
            rows: How many rows the chunk has.
            what: The chunk, for messages.
        """
        try:
            entries = read_struct(memoryview(data), 0)[0][1]
            at = [int(entry[1]) - start for entry in entries]
            begins = [int(entry[3]) for entry in entries]
            end = at[-1] + int(entries[-1][2])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SourceError(f"{what} has an offset index that is none ({error!r}): it is damaged") from error
        if (
            begins[0]
            or at[0] < 0
            or any(x >= y for x, y in [*pairwise(begins), *pairwise([*at, end]), (begins[-1], rows)])
        ):
            raise SourceError(f"{what} has an offset index that goes to and fro: it is damaged")
        coded = has_dictionary and at[0] > 0
        pages = zip(begins, at, [coded] * len(at), strict=True)
        return cls(np.array([(0, at[0] if coded else 0, 0), *pages, (rows, end, 0)], dtype=np.int64))


def take_pages(give: Give, size: int, first: int, last: int, what: str) -> TakenPages:
    """Walk along a column chunk and take what holds rows ``[first, last)`` of it."""
    places = PagePlaces()
    places.walk(give, size, last, what)
    return fetched(give, places.find(first, last, what), what)


def fetched(give: Give, found: FoundPages, what: str) -> TakenPages:
    """The pages themselves."""
    ranges = [found.data] if found.dictionary is None else [found.dictionary, found.data]
    pages = tuple(_bytes(give, *one, what) for one in ranges)
    return TakenPages(pages, found.dictionary is not None, found.row_count, found.skip, found.wanted)


def _header(give: Give, at: int, size: int, what: str) -> tuple[dict[int, Any], int]:
    """A page's header, and where the page ends."""
    asked = min(_HEADER_BYTES, size - at)
    while True:
        data = give(at, asked)
        try:
            header, length = read_struct(data, 0)
            break
        except NotWhole as error:
            if len(data) >= size - at:
                raise SourceError(f"{what} has a page header that breaks off: it is damaged") from error
            asked = min(max(asked, len(data)) * 4, size - at)
        except ValueError as error:
            raise SourceError(f"{what} has no page header at byte {at} of it ({error}): it is damaged") from error
    raw, compressed = header.get(2), header.get(3)
    if not isinstance(raw, int) or not 0 <= raw <= _LARGEST_PAGE_BYTES:
        raise SourceError(
            f"{what} has a page of {raw!r} bytes when decompressed: expected {_LARGEST_PAGE_BYTES} or fewer; it is "
            "damaged, or written with data pages that are far too large"
        )
    if not isinstance(compressed, int) or compressed < 0 or at + length + compressed > size:
        raise SourceError(
            f"{what} has a page of {compressed!r} bytes, and {size - at - length} are left: it is damaged"
        )
    return header, at + length + compressed


def _data_page(header: dict[int, Any], kind: int, what: str) -> tuple[int, bool]:
    """A data page's rows, and whether its values are numbers of a dictionary's entries."""
    inner = header.get(5 if kind == _DATA else 8)
    inner = inner if isinstance(inner, dict) else {}
    count, encoding = inner.get(1), inner.get(2 if kind == _DATA else 4)
    if not isinstance(count, int) or count < 0:
        raise SourceError(f"{what} has a data page with {count!r} rows: it is damaged")
    return count, encoding in _BY_DICTIONARY


def _bytes(give: Give, at: int, stop: int, what: str) -> memoryview:
    data = give(at, stop - at)
    if len(data) < stop - at:
        raise SourceError(f"{what} breaks off at byte {at + len(data)} of it: it is damaged")
    return data[: stop - at]


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of some rows, None where there is none. What a dictionary holds once is here once, however often."""

    rows: list[str | None]
    size_bytes: int
    """Of all of them, each as often as it is there."""


def must_spell_out(levels: int) -> bool:
    """Whether entries of a dictionary are spelled out for every row in any case: pyarrow hands them out as they are
    only in columns that are in no struct."""
    return levels > 1


def decode(
    taken: Sequence[TakenPages], codecs: Sequence[str], levels: int, what: str, *, spell_out: bool = False
) -> Texts:
    """The wanted rows of several column chunks, end to end.

    Args:
        taken: Of each chunk, what holds its rows.
        codecs: What each is compressed with, by pyarrow's name.
        levels: How many of the column and the groups around it may be null.
        what: Where this is from, for messages.
        spell_out: Whether entries of a dictionary may be spelled out for every row of the data pages: a quarter
            quicker, in as many times the memory as they are used.
    """
    import pyarrow as pa
    from pyarrow import parquet

    spell_out = spell_out or must_spell_out(levels)
    coded = ["c"] if any(some.has_dictionary for some in taken) and not spell_out else None
    try:
        file = parquet.ParquetFile(
            pa.BufferReader(_file(taken, codecs, levels)), page_checksum_verification=True, read_dictionary=coded
        )
        table = file.read(use_threads=False)
        column = table.column(0)
        for _ in range(max(0, levels - 1)):
            column = pa.chunked_array([chunk.flatten()[0] for chunk in column.chunks], type=column.type[0].type)
        wanted, at = [], 0
        for some in taken:
            wanted.append(column.slice(at + some.skip, some.wanted))
            at += some.row_count
        found = pa.chunked_array([chunk for some in wanted for chunk in some.chunks], type=column.type)
        found.validate(full=True)  # nobody else looks whether offsets lie inside their buffers and strings are UTF-8
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{what} is not sound Parquet: {error}") from error
    expected = sum(some.wanted for some in taken)
    if len(found) != expected or at != len(column):
        raise SourceError(f"{what} has {len(found)} of the {expected} rows that its headers tell of: it is damaged")
    rows: list[str | None] = []
    size = 0
    for chunk in found.chunks:
        texts, length = _spelled_out(chunk)
        rows += texts
        size += length
    return Texts(rows, size)


def _spelled_out(chunk: Any) -> tuple[list[str | None], int]:
    """An array's texts, and their bytes. Those of a dictionary are one object each, and only the ones that are used."""
    import pyarrow as pa

    if not pa.types.is_dictionary(chunk.type):
        return chunk.to_pylist(), int(_lengths(chunk).sum())
    places = chunk.indices.to_pylist()
    texts = {place: None if place is None else chunk.dictionary[place].as_py() for place in set(places)}
    used = np.array([place for place in places if place is not None], dtype=np.int64)
    return [texts[place] for place in places], int(_lengths(chunk.dictionary)[used].sum())


def _lengths(strings: Any) -> np.ndarray:
    """The bytes of each of an array's strings. By hand: pyarrow's functions take a tenth of a second to import."""
    import pyarrow as pa

    offsets = strings.buffers()[1]
    if offsets is None or not len(strings):
        return np.zeros(len(strings), dtype=np.int64)
    kind = np.int64 if pa.types.is_large_string(strings.type) else np.int32
    return np.diff(np.frombuffer(offsets, dtype=kind)[strings.offset : strings.offset + len(strings) + 1])


def _file(taken: Sequence[TakenPages], codecs: Sequence[str], levels: int) -> bytes:
    """A Parquet file with one column and a row group for each chunk. Groups that may be null stand around the column as
    often as in the file it is from: what is null is told by numbers that count them."""
    path = [b"c"] * max(1, levels)
    schema = [((4, b"schema"), (5, 1))]
    schema += [((3, _OPTIONAL), (4, b"c"), (5, 1)) for _ in path[1:]]
    schema += [((1, _BYTE_ARRAY), (3, _OPTIONAL if levels else 0), (4, b"c"), (6, _UTF8))]
    groups, pieces, at = [], [memoryview(_MAGIC)], len(_MAGIC)
    for some, codec in zip(taken, codecs, strict=True):
        size = sum(map(len, some.pages))
        data_at = at + (len(some.pages[0]) if some.has_dictionary else 0)
        facts = [(1, _BYTE_ARRAY), (2, _ENCODINGS), (3, path), (4, _CODECS[codec]), (5, I64(some.row_count))]
        facts += [(6, I64(size)), (7, I64(size)), (9, I64(data_at))]
        facts += [(11, I64(at))] if some.has_dictionary else []
        groups.append(((1, [((2, I64(at)), (3, tuple(facts)))]), (2, I64(size)), (3, I64(some.row_count))))
        pieces += some.pages
        at += size
    footer = write_struct([(1, 1), (2, schema), (3, I64(sum(some.row_count for some in taken))), (4, groups)])
    return b"".join([*pieces, footer, struct.pack("<I", len(footer)), _MAGIC])


def refuse_codec(codec: str, what: str) -> None:
    if codec not in _CODECS:
        raise SourceError(
            f"{what} is compressed with {codec}, which is not known: expected one of {', '.join(_CODECS)}"
        )

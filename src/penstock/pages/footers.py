"""What a shard's footer says of one column: which rows each row group has, and where its bytes are."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from penstock.errors import SourceError
from penstock.pages.data_pages import refuse_codec
from penstock.pages.thrift import read_struct
from penstock.sources.columns import TEXT_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

TAIL_BYTES = 64 << 10
"""How much of a shard's end is asked for first."""
LARGEST_FOOTER_BYTES = 512 << 20
_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")
_SAVED = "penstock column facts 3"
COLUMNS = 9
_LARGE_BYTES = 1 << 20
"""Chunks above this may be worth reading in part."""
_INDEXED_FOOTER_BYTES = 1 << 20
"""Larger footers are of many small row groups, which need no such thing."""
_SIZED_FOOTER_BYTES = 256 << 10
"""Up to this it is worth looking how large texts are that a dictionary holds once; else it is seen when they come."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnFacts:
    """One column of a shard, group by group."""

    column: str
    levels: int
    """How many of it and of the groups around it may be null."""
    codecs: tuple[str, ...]
    groups: np.ndarray
    """``(row groups, 9)``: rows up to its end, where the column's chunk begins, its bytes, its bytes when decompressed,
    the codec's place in `codecs`; where its offset index begins and its bytes, none for 0; whether it has a dictionary;
    the bytes of its texts, each as often as it is there, 0 where nobody says so."""

    @property
    def num_rows(self) -> int:
        return int(self.groups[-1, 0]) if len(self.groups) else 0

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes + 500

    def pieces(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """The row groups that hold rows ``[first, last)``, each with its own rows of them."""
        ends = self.groups[:, 0]
        group = int(np.searchsorted(ends, first, side="right"))
        found = []
        while first < last:
            start, stop = int(ends[group - 1]) if group else 0, int(ends[group])
            if first < stop:
                found.append((group, first - start, min(last, stop) - start))
                first = min(last, stop)
            group += 1
        return found

    def saved(self) -> bytes:
        head = orjson.dumps([_SAVED, self.column, self.levels, self.codecs])
        return head + b"\n" + self.groups.astype("<i8").tobytes()

    @classmethod
    def from_saved(cls, data: bytes) -> ColumnFacts:
        """What `saved` made; a ValueError where it did not."""
        head, _, rest = data.partition(b"\n")
        told, column, levels, codecs = orjson.loads(head)
        if told != _SAVED:
            raise ValueError(told)
        return cls(column, levels, tuple(codecs), np.frombuffer(rest, dtype="<i8").reshape(-1, COLUMNS))


def read_footer(read: Callable[[int, int], bytes], size: int, what: str, guess: int = TAIL_BYTES) -> tuple[Any, bytes]:
    """A shard's metadata, as pyarrow has it, and as it is; one request, or two.

    Args:
        read: Bytes of the shard.
        size: How many it has.
        what: Its name, for messages.
        guess: How much to ask for first.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if size < len(_MAGIC) + _TAIL.size:
        raise SourceError(f"{what} has {size} bytes, which is no Parquet file: expected one")
    tail = read(max(0, size - guess), size)
    length, magic = _TAIL.unpack(tail[-_TAIL.size :]) if len(tail) >= _TAIL.size else (0, b"")
    if magic != _MAGIC:
        told = "it is encrypted" if magic == b"PARE" else "it is no Parquet file, or breaks off"
        raise SourceError(f"{what} does not end as a Parquet file does: {told}")
    needed = length + _TAIL.size
    if needed > size or needed > LARGEST_FOOTER_BYTES:
        raise SourceError(f"{what} tells of a footer of {length} bytes, and has {size}: it is damaged")
    if needed > len(tail):
        tail = read(size - needed, size)
    try:
        return parquet.read_metadata(pa.BufferReader(tail[-needed:])), tail[-needed : -_TAIL.size]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{what} is not a sound Parquet file: {error}") from error


def column_facts(metadata: Any, wanted: str | None, size: int, what: str, raw: bytes | None = None) -> ColumnFacts:
    """What is needed to read one column of a shard: the one named, else the first that is usually the text.

    Args:
        metadata: The shard's footer, as pyarrow has it.
        wanted: The column.
        size: How many bytes the shard has.
        what: The shard, for messages.
        raw: The footer as it is, for where the offset indexes of large chunks are.
    """
    try:
        return _column_facts(metadata, wanted, size, what, raw)
    except UnicodeDecodeError as error:  # names are looked at only when they are asked for
        raise SourceError(f"{what} has a name in its footer that is no text ({error}): it is damaged") from error


def _column_facts(metadata: Any, wanted: str | None, size: int, what: str, raw: bytes | None) -> ColumnFacts:
    place, column = _find(metadata.schema, wanted, what)
    codecs: list[str] = []
    rows, groups = 0, np.zeros((metadata.num_row_groups, COLUMNS), dtype=np.int64)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunk = group.column(place)
        offsets = [at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at]
        start, length = min(offsets, default=0), chunk.total_compressed_size
        rows += group.num_rows
        if group.num_rows and (start < len(_MAGIC) or length < 0 or start + length > size or chunk.file_path):
            raise SourceError(
                f"{what}: the footer says that column {column.path!r} of row group {number} is at bytes {start} to "
                f"{start + length} of {size}: it is damaged, or its data is in another file"
            )
        if chunk.compression not in codecs:
            refuse_codec(chunk.compression, f"{what}: column {column.path!r}")
            codecs.append(chunk.compression)
        groups[number, :5] = rows, start, length, chunk.total_uncompressed_size, codecs.index(chunk.compression)
        groups[number, 7] = bool(chunk.dictionary_page_offset)
    if rows != metadata.num_rows:
        raise SourceError(
            f"{what}: its row groups have {rows} rows, its footer says {metadata.num_rows}: it is damaged"
        )
    is_large, has_dictionary = groups[:, 2].max(initial=0) > _LARGE_BYTES, bool(groups[:, 7].any())
    worth_bytes = _INDEXED_FOOTER_BYTES if is_large else _SIZED_FOOTER_BYTES if has_dictionary else 0
    if raw is not None and len(raw) <= worth_bytes:
        groups[:, [5, 6, 8]] = _untold(raw, place, len(groups))
    return ColumnFacts(column.path, column.max_definition_level, tuple(codecs), groups)


def _untold(raw: bytes, place: int, count: int) -> np.ndarray:
    """What pyarrow does not tell of a footer: of each chunk of a column, where its offset index is, the index's bytes,
    and the bytes of the chunk's values."""
    try:
        groups = read_struct(memoryview(raw), 0)[0][4]
        chunks = [group[1][place] for group in groups]
        sizes = [chunk[3].get(16, {}).get(1, 0) for chunk in chunks]
        indexes = [(chunk.get(4, 0), chunk.get(5, 0)) for chunk in chunks]
        found = np.array([(*index, max(0, size)) for index, size in zip(indexes, sizes, strict=True)], dtype=np.int64)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        found = np.zeros((0, 3), dtype=np.int64)
    return found if found.shape == (count, 3) else np.zeros((count, 3), dtype=np.int64)


def _find(schema: Any, wanted: str | None, what: str) -> tuple[int, Any]:
    columns = [schema.column(place) for place in range(len(schema))]
    paths = [column.path for column in columns]
    names = [wanted] if wanted is not None else [name for name in TEXT_COLUMNS if name in paths]
    told = ", ".join(map(repr, paths[:50])) + (f" and {len(paths) - 50} more" if len(paths) > 50 else "")
    if not names or names[0] not in paths:
        missing = f"no column {wanted!r}" if wanted is not None else "no column with a usual name for text"
        raise SourceError(f"{what} has {missing}: it has {told}; name one of them as text_column")
    if paths.count(names[0]) > 1:
        raise SourceError(f"{what} has two columns named {names[0]!r}: rename one of them")
    place = paths.index(names[0])
    column = columns[place]
    kind = column.logical_type.type if column.logical_type is not None else ""
    if column.physical_type != "BYTE_ARRAY" or (kind != "STRING" and column.converted_type != "UTF8"):
        held = column.physical_type if kind in ("NONE", "") else kind
        raise SourceError(
            f"{what}: column {names[0]!r} holds {held}, expected strings: it has {told}; name another one"
        )
    if column.max_repetition_level:
        raise SourceError(f"{what}: column {names[0]!r} holds lists, expected one string a row: name another one")
    return place, column

"""Megatron's pair of files: tokens end to end in a .bin, and beside it an .idx that says where each sequence ends.

.idx   magic, version, type of the tokens, number of sequences, number of documents,
       then an int32 length a sequence, an int64 place a sequence, and which sequences begin a document
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from penstock.errors import SourceError
from penstock.sources.base import Cursor, RowBatch
from penstock.sources.streams import go_to, read_whole
from penstock.sources.tokens import token_rows
from penstock.storage import ReadableStorage

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SEQUENCES_AT_A_TIME = 1024
_TOKENS_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True)
class _Index:
    dtype: np.dtype
    sequences: int


def is_megatron_index(storage: ReadableStorage, key: str) -> bool:
    return storage.get_range(key, 0, len(_MAGIC)) == _MAGIC


def read_sequences(
    file: BinaryIO, name: str, start: Cursor, storage: ReadableStorage, index_key: str
) -> Iterator[RowBatch]:
    """A sample a sequence. Reads the index beside the tokens, a thousand sequences at a time."""
    index = _read_index(storage, index_key, storage.head(name).size_bytes)
    row, place = start.row, start.offset
    go_to(file, place)
    with (
        storage.reader(index_key, _HEADER.size + 4 * row) as lengths_file,
        storage.reader(index_key, _HEADER.size + 4 * index.sequences + 8 * row) as places_file,
    ):
        while row < index.sequences:
            count = min(_SEQUENCES_AT_A_TIME, index.sequences - row)
            lengths = np.frombuffer(read_whole(lengths_file, 4 * count), dtype="<i4").astype(np.int64)
            places = np.frombuffer(read_whole(places_file, 8 * count), dtype="<i8")
            _check(index_key, row, place, lengths * index.dtype.itemsize, places)
            for first, last in _groups(lengths):
                tokens = int(lengths[first:last].sum())
                data = read_whole(file, tokens * index.dtype.itemsize)
                if len(data) < tokens * index.dtype.itemsize:
                    raise SourceError(
                        f"{name}: ended before sequence {row + last}: expected as many as {index_key} says"
                    )
                ids = np.frombuffer(data, dtype=index.dtype)
                pieces = np.split(ids, np.cumsum(lengths[first:last])[:-1])
                yield token_rows(pieces, name, replace(start, offset=place, row=row + first, skip=0))
                place += len(data)
            row += len(lengths)


def _check(key: str, row: int, place: int, sizes: np.ndarray, places: np.ndarray) -> None:
    """Refuse sequences that do not lie end to end: what lies between them would be lost."""
    expected = place + np.cumsum(sizes) - sizes
    wrong = np.flatnonzero((sizes < 0) | (places != expected))
    if len(wrong):
        at = int(wrong[0])
        raise SourceError(
            f"{key}: sequence {row + at + 1} has {sizes[at]} bytes from byte {places[at]}, expected one from byte "
            f"{expected[at]}: the index is damaged"
        )


def _groups(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Neighbouring sequences that are few tokens together; at least one."""
    first = total = 0
    for last, length in enumerate(lengths.tolist()):
        if total + length > _TOKENS_AT_A_TIME and last > first:
            yield first, last
            first, total = last, 0
        total += length
    if first < len(lengths):
        yield first, len(lengths)


def _read_index(storage: ReadableStorage, key: str, bin_bytes: int) -> _Index:
    head = storage.get_range(key, 0, _HEADER.size)
    try:
        _, version, code, sequences, documents = _HEADER.unpack(head)
        dtype = np.dtype(_DTYPES[code])
    except (struct.error, KeyError) as error:
        raise SourceError(f"{key}: not a sound index: {error}: expected whole numbers and its version 1") from error
    expected = _HEADER.size + 12 * sequences + 8 * documents
    size = storage.head(key).size_bytes
    if version != 1 or size < expected:
        raise SourceError(f"{key}: version {version} of {size} bytes: expected version 1 of {expected} bytes")
    if sequences:
        last = _HEADER.size + 12 * sequences - 8
        begins = struct.unpack("<q", storage.get_range(key, last, last + 8))[0]
        length = struct.unpack(
            "<i", storage.get_range(key, _HEADER.size + 4 * sequences - 4, _HEADER.size + 4 * sequences)
        )[0]
        if length < 0 or begins + length * dtype.itemsize != bin_bytes:
            raise SourceError(
                f"{key} ends at byte {begins + length * dtype.itemsize} of its tokens, which have {bin_bytes} bytes: "
                "the two files do not belong together"
            )
    elif bin_bytes:
        raise SourceError(f"{key} tells of no sequences, but its tokens have {bin_bytes} bytes: it is damaged")
    return _Index(dtype, sequences)

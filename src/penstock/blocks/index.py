"""The block index: where each sample lies, and a running CRC, so that any range can be read and checked by itself.

    8 bytes    magic, with the format's version
    8 bytes    number of samples n, little-endian
    (n+1) x 12 offset (uint64) and CRC-32 of all the block's bytes before that offset (uint32)

A range ``[i, j)`` is whole when CRC-32, started from entry i's value and run over the bytes between the two offsets,
ends at entry j's value: one call, no per-sample work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from isal import isal_zlib

from penstock.errors import CorruptBlockError, ObjectNotFound
from penstock.storage import Storage

_MAGIC = b"PENSIDX1"
_HEADER_BYTES = 16
_ENTRY = np.dtype([("offset", "<u8"), ("crc", "<u4")])


class IndexBuilder:
    """Collects the entries of a block while it is written."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._crcs: list[int] = [0]

    def extend(self, lines: Sequence[bytes | memoryview]) -> None:
        self._lengths.extend(map(len, lines))
        running = accumulate(lines, lambda crc, line: isal_zlib.crc32(line, crc), initial=self._crcs[-1])
        next(running)
        self._crcs.extend(running)

    def to_bytes(self) -> bytes:
        count = len(self._lengths)
        entries = np.zeros(count + 1, dtype=_ENTRY)
        np.cumsum(np.asarray(self._lengths, dtype=np.uint64), out=entries["offset"][1:])
        entries["crc"] = self._crcs
        return _MAGIC + count.to_bytes(8, "little") + entries.tobytes()


def index_of_lines(lines: Iterable[bytes]) -> bytes:
    """The index that belongs to a block with these lines."""
    builder = IndexBuilder()
    builder.extend(list(lines))
    return builder.to_bytes()


def index_bytes(sample_count: int) -> int:
    """How long the index of a block is."""
    return _HEADER_BYTES + (sample_count + 1) * _ENTRY.itemsize


def check_index(storage: Storage, index_file: str, sample_count: int, size_bytes: int) -> None:
    """Refuse an index that is not of a block with so many samples and bytes."""
    head = _range(storage, index_file, 0, _HEADER_BYTES)
    end = index_bytes(sample_count)
    last = _range(storage, index_file, end - _ENTRY.itemsize, end + 1)
    count = int.from_bytes(head[8:], "little")
    told = int.from_bytes(last[:8], "little") if len(last) == _ENTRY.itemsize else -1
    if head[:8] != _MAGIC or count != sample_count or told != size_bytes:
        raise CorruptBlockError(
            f"{storage.url}/{index_file} is not the index of a block with {sample_count} samples and {size_bytes} "
            f"bytes, as the manifest has it: {_advice(storage)}"
        )


def read_index(storage: Storage, index_file: str) -> np.ndarray:
    """All entries of an index, with fields ``offset`` and ``crc``; one more than samples."""
    raw = _range(storage, index_file, 0, 1 << 62)
    count = int.from_bytes(raw[8:_HEADER_BYTES], "little")
    if raw[:8] != _MAGIC or len(raw) != _HEADER_BYTES + (count + 1) * _ENTRY.itemsize:
        raise CorruptBlockError(f"{storage.url}/{index_file} is not a whole index: {_advice(storage)}")
    return np.frombuffer(raw, dtype=_ENTRY, offset=_HEADER_BYTES)


def read_samples(storage: Storage, block_file: str, index_file: str, start: int, stop: int) -> bytes:
    """The stored lines of samples ``[start, stop)`` of a block: one range of the index, one of the block, checked."""
    first = _HEADER_BYTES + start * _ENTRY.itemsize
    last = _HEADER_BYTES + (stop + 1) * _ENTRY.itemsize
    raw = _range(storage, index_file, first, last)
    if len(raw) != last - first:
        raise CorruptBlockError(
            f"{storage.url}/{index_file} is too short for samples {start} to {stop} of its block: got "
            f"{len(raw)} bytes, expected {last - first}: {_advice(storage)}"
        )
    entries = np.frombuffer(raw, dtype=_ENTRY)
    begin, end = int(entries["offset"][0]), int(entries["offset"][-1])
    data = _range(storage, block_file, begin, end) if begin <= end else b""
    if len(data) != end - begin or isal_zlib.crc32(data, int(entries["crc"][0])) != int(entries["crc"][-1]):
        raise CorruptBlockError(
            f"{storage.url}/{block_file}: samples {start} to {stop} of the block (bytes {begin} to {end}) are not what "
            f"was written: {_advice(storage)}"
        )
    return data


def _range(storage: Storage, file: str, start: int, stop: int) -> bytes:
    try:
        return storage.get_range(file, start, stop)
    except ObjectNotFound as error:
        raise CorruptBlockError(f"{storage.url}/{file} is missing: {_advice(storage)}") from error


def _advice(storage: Storage) -> str:
    return f"see what else is with `penstock inspect {storage.url} --verify`, and ingest again into a new folder"

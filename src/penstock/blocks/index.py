"""The block index: where each sample lies, and a running CRC, so that any range can be read and checked by itself.

    8 bytes    magic, with the format's version
    8 bytes    number of samples n, little-endian
    (n+1) x 12 offset (uint64) and CRC-32 of all the block's bytes before that offset (uint32)

A range ``[i, j)`` is whole when CRC-32, started from entry i's value and run over the bytes between the two offsets,
ends at entry j's value: one call, no per-sample work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
from isal import isal_zlib

from penstock.blocks.manifest import BlockEntry
from penstock.errors import CorruptBlockError, ObjectNotFound
from penstock.storage import Storage

_MAGIC = b"PENSIDX1"
_HEADER_BYTES = 16
ENTRY = np.dtype([("offset", "<u8"), ("crc", "<u4")])


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
        entries = np.zeros(count + 1, dtype=ENTRY)
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
    return _HEADER_BYTES + (sample_count + 1) * ENTRY.itemsize


def check_index(storage: Storage, entry: BlockEntry) -> None:
    """Refuse an index that is not of a block with so many samples and bytes."""
    head = _range(storage, entry.index_file, 0, _HEADER_BYTES)
    end = index_bytes(entry.sample_count)
    last = _range(storage, entry.index_file, end - ENTRY.itemsize, end + 1)
    count = int.from_bytes(head[8:], "little")
    told = int.from_bytes(last[:8], "little") if len(last) == ENTRY.itemsize else -1
    if head[:8] != _MAGIC or count != entry.sample_count or told != entry.size_bytes:
        _refuse_index(storage, entry)


def _refuse_index(storage: Storage, entry: BlockEntry) -> NoReturn:
    raise CorruptBlockError(
        f"{storage.url}/{entry.index_file} is not the index of a block with {entry.sample_count} samples and "
        f"{entry.size_bytes} bytes, as the manifest has it: {advice(storage)}"
    )


def entries_of(raw: bytes, storage: Storage, entry: BlockEntry) -> np.ndarray:
    """All entries of the index of a block, checked against what the manifest says of the block."""
    fits = len(raw) == index_bytes(entry.sample_count) and raw[:8] == _MAGIC
    entries = np.frombuffer(raw, dtype=ENTRY, offset=_HEADER_BYTES) if fits else np.zeros(1, dtype=ENTRY)
    told = int.from_bytes(raw[8:_HEADER_BYTES], "little"), int(entries[-1]["offset"])
    if not fits or told != (entry.sample_count, entry.size_bytes):
        _refuse_index(storage, entry)
    return entries


def read_samples(storage: Storage, block_file: str, index_file: str, start: int, stop: int) -> bytes:
    """The stored lines of samples ``[start, stop)`` of a block: one range of the index, one of the block, checked."""
    first = _HEADER_BYTES + start * ENTRY.itemsize
    last = _HEADER_BYTES + (stop + 1) * ENTRY.itemsize
    raw = _range(storage, index_file, first, last)
    if len(raw) != last - first:
        raise CorruptBlockError(
            f"{storage.url}/{index_file} is too short for samples {start} to {stop} of its block: got "
            f"{len(raw)} bytes, expected {last - first}: {advice(storage)}"
        )
    entries = np.frombuffer(raw, dtype=ENTRY)
    place = BytesOfSamples.between(entries[0], entries[-1])
    data = _range(storage, block_file, place.begin, place.end) if place.begin <= place.end else b""
    if not place.holds(data):
        refuse_damaged(storage, block_file, start, stop, place)
    return data


@dataclass(frozen=True, slots=True)
class BytesOfSamples:
    """Where a range of samples lies in its block, and what its bytes must come to."""

    begin: int
    end: int
    crc_before: int
    crc: int

    @classmethod
    def between(cls, first: Any, last: Any) -> BytesOfSamples:
        """From the entry of the first sample to that behind the last."""
        return cls(int(first["offset"]), int(last["offset"]), int(first["crc"]), int(last["crc"]))

    def holds(self, data: bytes) -> bool:
        return len(data) == self.end - self.begin and isal_zlib.crc32(data, self.crc_before) == self.crc


def refuse_damaged(storage: Storage, block_file: str, start: int, stop: int, place: BytesOfSamples) -> NoReturn:
    raise CorruptBlockError(
        f"{storage.url}/{block_file}: samples {start} to {stop} of the block (bytes {place.begin} to {place.end}) are "
        f"not what was written: {advice(storage)}"
    )


def _range(storage: Storage, file: str, start: int, stop: int) -> bytes:
    try:
        return storage.get_range(file, start, stop)
    except ObjectNotFound as error:
        raise CorruptBlockError(f"{storage.url}/{file} is missing: {advice(storage)}") from error


def advice(storage: Storage) -> str:
    """What to do about damage."""
    return f"see what else is with `penstock inspect {storage.url} --verify`, and ingest again into a new folder"

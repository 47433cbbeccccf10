"""Segments of a token store: files that one process writes, piece by piece, and any may read.

A store that is bounded deletes segments as a whole, those used longest ago first.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEGMENT_BYTES = 256 << 20
"""Of a store that is bounded, at most: what is deleted together."""
_SEGMENTS = 8
"""How many a bounded store has room for, at least."""
_UNBOUNDED_SEGMENT_BYTES = 1 << 30
_ALIGN = 8
_LARGEST_ROW_BYTES = 64 << 10
PIECE_BYTES = 128 << 10
"""What is written by one request is kept together in the system's memory, and mapped and given back as one: larger
pieces cost less, and map more around what is used."""
_PARTS = 512
"""Of one request to write; systems take 1,024."""


class Payload(NamedTuple):
    """What is written of a chunk, and where it may be."""

    number: int
    ends: bytes
    ids: memoryview
    samples: int
    tokens: int
    align: int
    remainder: int

    @property
    def size(self) -> int:
        return len(self.ends) + len(self.ids)

    @classmethod
    def of(cls, number: int, ids: np.ndarray, offsets: np.ndarray, common_length: int, dtype: np.dtype) -> Payload:
        """Rows of one length are put at multiples of it, so that a reader can take the segment for a matrix of them."""
        ends = offsets.astype("<u4").tobytes()
        ends = ends.ljust(aligned(len(ends)), b"\0")
        raw = np.ascontiguousarray(ids, dtype=dtype).data.cast("B")
        row_bytes = common_length * dtype.itemsize
        align, remainder = _ALIGN, 0
        if row_bytes % _ALIGN == 0 and 0 < row_bytes <= _LARGEST_ROW_BYTES:
            align, remainder = row_bytes, -len(ends) % row_bytes
        return cls(number, ends, raw, len(offsets) - 1, len(ids), align, remainder)


class SegmentWriter:
    """Appends payloads to a segment of this process's own. Not safe for threads."""

    def __init__(self, folder: Path, max_bytes: int | None, fds: set[int]) -> None:
        """Begin with nothing: a segment is made for the first payload.

        Args:
            folder: Where segments are.
            max_bytes: How much all of them may take.
            fds: Where descriptors are kept that are open.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._fds = fds
        self._own: tuple[int, int, int] | None = None
        """The segment this process writes: its number, its descriptor, its size."""
        self._segment_bytes = _UNBOUNDED_SEGMENT_BYTES
        if max_bytes is not None:
            self._segment_bytes = min(SEGMENT_BYTES, max(1, max_bytes // _SEGMENTS))

    def end(self) -> None:
        """Write to it no more: its descriptor was closed with the others."""
        self._own = None

    def append(self, payloads: list[Payload], on_deleted: Callable[[], None]) -> list[tuple[int, int]]:
        """Write payloads behind the others, each where its place leaves its remainder; tells segments and places.

        `on_deleted` is called when others may have been deleted. It is not kept: whoever writes here is held by nobody.
        """
        places: list[tuple[int, int]] = []
        waiting: list[bytes | memoryview] = []
        at = self._own[2] if self._own is not None else 0
        for each in payloads:
            if self._own is None or (at and at + each.size + each.align > self._segment_bytes):
                self._write(waiting)
                waiting, at = [], 0
                self._begin_segment(each.size + each.align, on_deleted)
            assert self._own is not None
            gap = (each.remainder - at) % each.align
            places.append((self._own[0], at + gap))
            waiting += [bytes(gap), each.ends, each.ids, bytes(-(at + gap + each.size) % _ALIGN)]
            at = aligned(at + gap + each.size)
        self._write(waiting)
        return places

    def _write(self, parts: list[bytes | memoryview]) -> None:
        """Write behind what is there, piece by piece of the system's memory."""
        if self._own is None:
            return
        number, fd, at = self._own
        left = deque(memoryview(part) for part in parts if len(part))
        while left:
            piece: list[memoryview] = []
            room = PIECE_BYTES - at % PIECE_BYTES
            while left and room and len(piece) < _PARTS:
                part = left.popleft()
                if len(part) > room:
                    left.appendleft(part[room:])
                piece.append(part[:room])
                room -= len(piece[-1])
            while piece:
                written = os.pwritev(fd, piece, at)
                at += written
                while piece and written >= len(piece[0]):
                    written -= len(piece.pop(0))
                if written:
                    piece[0] = piece[0][written:]
        self._own = number, fd, at

    def _begin_segment(self, size: int, on_deleted: Callable[[], None]) -> None:
        if self._own is not None:
            self._fds.discard(self._own[1])
            os.close(self._own[1])
            self._own = None
        if self._max_bytes is not None:
            self._evict(self._max_bytes - max(size, self._segment_bytes))
            on_deleted()
        names = [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]
        number = max(names, default=-1) + 1
        while True:
            with suppress(FileExistsError):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._own = number, os.open(segment_path(self._folder, number), flags, 0o644), 0
                self._fds.add(self._own[1])
                return
            number += 1

    def _evict(self, left_bytes: int) -> None:
        """Delete the segments used longest ago until so much is left. Readers keep what they are at."""
        facts = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process is at it too
                told = path.stat()
                facts.append((told.st_mtime_ns, told.st_size, path))
        total = sum(size for _, size, _ in facts)
        for _, size, path in sorted(facts):
            if total <= left_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

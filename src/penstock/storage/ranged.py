"""An object as a file: read by ranges that grow while reading goes on, each range whole before any of it is used."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from penstock.storage.base import ObjectInfo

_FIRST_RANGE_BYTES = 256 << 10
_LARGEST_RANGE_BYTES = 8 << 20
_BUFFER_BYTES = 64 << 10


class RangedFile(io.RawIOBase):
    """Bytes from a function that gives any range of one version of an object. Holds one range in memory.

    Costs a request a range; a seek costs one more. Who reads a little pays little, who reads on gets few requests.
    """

    def __init__(self, info: ObjectInfo, what: str, fetch: Callable[[int, int], bytes], start: int = 0) -> None:
        super().__init__()
        self._info = info
        self._what = what
        self._fetch = fetch
        self._position = start
        self._held_from = start
        self._held = memoryview(b"")
        self._next_bytes = _FIRST_RANGE_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size_bytes}
        target = bases[whence] + offset if whence in bases else -1
        if target < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._what)
        self._position = target
        return target

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")
        if not len(wanted) or self._position >= self._info.size_bytes:
            return 0
        place = self._position - self._held_from
        if not 0 <= place < len(self._held):
            self._take(len(wanted))
            place = 0
        piece = self._held[place : place + len(wanted)]
        wanted[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _take(self, wanted: int) -> None:
        reads_on = self._position == self._held_from + len(self._held)
        self._next_bytes = min(_LARGEST_RANGE_BYTES, self._next_bytes * 4) if reads_on else _FIRST_RANGE_BYTES
        stop = min(self._info.size_bytes, self._position + max(wanted, self._next_bytes))
        self._held = memoryview(b"")
        self._held = memoryview(self._fetch(self._position, stop))
        self._held_from = self._position


def open_ranged(info: ObjectInfo, what: str, fetch: Callable[[int, int], bytes], start: int) -> BinaryIO:
    """A buffered file over `fetch`, from an offset on."""
    return cast(BinaryIO, io.BufferedReader(RangedFile(info, what, fetch, start), _BUFFER_BYTES))

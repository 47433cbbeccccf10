"""One answer over plain HTTP: its head is understood or left to others, its body goes where it will stay."""

from __future__ import annotations

import mmap
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar

from penstock.errors import StorageError, TransientStoreError
from penstock.storage.answers import REFUSED_CODES, answered, code_in
from penstock.storage.connection import Timeouts
from penstock.storage.partial import PartialRead
from penstock.storage.retry import parse_retry_after
from penstock.storage.secret import Secret

_AT_ONCE_BYTES = 16 << 20
"""Up to this a body is one `bytes`, received at once; a larger one gets a place, and is received so much at a time."""
_HEAD_BYTES, _MOST_HEAD_BYTES = 8 << 10, 64 << 10
_MOST_ERROR_BYTES = 64 << 10
_MOST_IDLE = 64
_LENGTH = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")

T = TypeVar("T")
Connection = tuple[socket.socket, float]
"""A socket, and when it was last used."""


class PlainAnswer:
    """One answer. Its connection serves again only once its body was read to the end."""

    def __init__(self, connection: socket.socket, what: str, timeouts: Timeouts, idle: deque[Connection]) -> None:
        self._connection = connection
        self._what = what
        self._idle = idle
        self._read_s = timeouts.read_s
        self._heard_at = time.monotonic()
        self._ends_at = self._heard_at + timeouts.whole_s
        self._may_stay_open = False
        self._is_left_open = False
        self.range = (0, 0)
        self.meta: dict[str, Any] = {}

    def begin(self, request: Secret, options: Mapping[str, Any]) -> bool:
        """Ask, and read until the body begins; False for an answer that is not understood."""
        try:
            self._connection.sendall(request.reveal().encode("latin-1", "replace"))
        except OSError:
            raise TransientStoreError(f"{self._what}: the connection broke off") from None
        status, fields = self._head()
        while 100 <= status < 200:
            status, fields = self._head()
        if status not in (200, 206):
            return self._refuse(status, fields)
        if "transfer-encoding" in fields or not _LENGTH.fullmatch(fields.get("content-length", "")):
            return False
        length = int(fields["content-length"])
        first, total = 0, length
        if status == 206:
            found = _CONTENT_RANGE.fullmatch(fields.get("content-range", ""))
            if found is None:
                return False
            first, last, total = map(int, found.groups())
            if last + 1 - first != length:
                raise TransientStoreError(f"{self._what}: the answer is broken")
        elif "range" in options:
            raise StorageError(f"{self._what}: asked for a range, got the whole object: ranges are not kept here")
        self.range = (first, first + length)
        self.meta = {"size": total, "e_tag": fields.get("etag"), "version": None, "last_modified": _moment(fields)}
        return True

    def take(self, partial: PartialRead) -> None:
        """Take the body; what arrives before a failure stays."""
        partial.was_begun = True
        left = self.range[1] - self.range[0]
        if left > _AT_ONCE_BYTES:
            left -= self._take_into_place(partial, left)
        while left and not partial.is_abandoned:
            piece = self._receive(left, socket.MSG_WAITALL)
            if not piece:
                self._raise_broken(partial)
            partial.add(piece)
            left -= len(piece)
        if not left:
            self._leave_open()

    def _take_into_place(self, partial: PartialRead, size: int) -> int:
        """Take a large body into one place, some at a time, unless it is abandoned; tells how much came."""
        try:
            place = _place_for(size)
        except (OSError, OverflowError):
            raise StorageError(f"{self._what}: there is no memory for its {size:,} bytes: read it by ranges") from None
        count = 0
        try:
            while count < size and not partial.is_abandoned:
                rest = place[count : count + _AT_ONCE_BYTES]
                came = self._waited_for(lambda rest=rest: self._connection.recv_into(rest, 0, socket.MSG_WAITALL))
                if not came:
                    self._raise_broken(partial, count)
                count += came
        finally:
            partial.add(place[:count].toreadonly())
        return count

    def close(self) -> None:
        """Hang up, unless all was read and the connection waits for the next."""
        if not self._is_left_open:
            self._connection.close()

    def _leave_open(self) -> None:
        if self._may_stay_open and len(self._idle) < _MOST_IDLE:
            self._is_left_open = True
            self._idle.append((self._connection, time.monotonic()))

    def _head(self) -> tuple[int, dict[str, str]]:
        """Status and fields. What follows them stays in the socket, for whoever has a place for it."""
        head = b""
        while True:
            seen = self._receive(_HEAD_BYTES, socket.MSG_PEEK)
            if not seen:
                raise TransientStoreError(f"{self._what}: the connection broke off")
            had = len(head)
            head += seen
            end = head.find(b"\r\n\r\n", max(0, had - 3))
            self._receive(len(seen) if end < 0 else end + 4 - had)
            if end >= 0:
                break
            if len(head) > _MOST_HEAD_BYTES:
                raise TransientStoreError(f"{self._what}: the answer is broken")
        first, *lines = head[:end].decode("latin-1").split("\r\n")
        if not (first.startswith("HTTP/1.") and first[9:12].isdecimal()):
            raise TransientStoreError(f"{self._what}: the answer is broken")
        parts = (line.partition(":") for line in lines)
        fields = {name.lower(): value.strip() for name, _, value in parts}
        wish = fields.get("connection", "").lower()
        self._may_stay_open = wish == "keep-alive" if first.startswith("HTTP/1.0") else wish != "close"
        return int(first[9:12]), fields

    def _refuse(self, status: int, fields: dict[str, str]) -> bool:
        """Raise what a status means, where that is certain."""
        told = fields.get("content-length", "")
        size = int(told) if _LENGTH.fullmatch(told) else 0
        left = min(size, _MOST_ERROR_BYTES)
        text = b""
        while left and (piece := self._receive(left)):
            text += piece
            left -= len(piece)
        code = code_in(text.decode("utf-8", "replace"))
        if size and "transfer-encoding" not in fields and size == len(text):
            self._leave_open()
        is_certain = status in (404, 408, 412, 416, 425, 429) or status >= 500
        if is_certain or (status == 403 and code in REFUSED_CODES):
            raise answered(status, code, self._what, parse_retry_after(fields.get("retry-after")))
        return False

    def _receive(self, size: int, how: int = 0) -> bytes:
        """Some bytes, at least one unless that was the end."""
        return self._waited_for(lambda: self._connection.recv(size, how))

    def _waited_for(self, receive: Callable[[], T]) -> T:
        """What is received, in time."""
        while True:
            try:
                got = receive()
            except BlockingIOError:
                got = None
            except OSError:
                raise TransientStoreError(f"{self._what}: the connection broke off") from None
            now = time.monotonic()
            if got:
                self._heard_at = now
            if now >= self._ends_at or (got is None and now - self._heard_at >= self._read_s):
                raise TransientStoreError(f"{self._what}: no answer in time")
            if got is not None:
                return got

    def _raise_broken(self, partial: PartialRead, more: int = 0) -> NoReturn:
        at = partial.start + partial.arrived + more
        raise TransientStoreError(f"{self._what}: the answer broke off at byte {at}")


def _place_for(size: int) -> memoryview:
    """Memory of its own, in large pages where the system has them: by small ones, threads that fill much at once wait
    for each other."""
    place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            place.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(place)


def _moment(fields: dict[str, str]) -> Any:
    told = fields.get("last-modified")
    if not told:
        return None
    try:
        moment = parsedate_to_datetime(told)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

"""JSON files: an array of objects, or objects one after the other, however they are laid out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

import orjson

from penstock.errors import SourceError
from penstock.sources.base import BadRow, Cursor, RowBatch, where
from penstock.sources.streams import advance

_READ_BYTES = 1 << 20
_BATCH_ROWS = 1024
_GAP = re.compile(rb"[\s,]*")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'["\\]')
_SCALAR = re.compile(rb"[^\s,\]}]+")


def read_json(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one JSON file; memory is bounded by the largest row, not by the file."""
    head = file.read(64)
    opening = len(head) - len(head.removeprefix(b"\xef\xbb\xbf"))
    opening += len(head[opening:]) - len(head[opening:].lstrip())
    is_array = head[opening : opening + 1] == b"["
    first = opening + 1 if is_array else opening
    at = start.offset or first
    if file.seekable():
        file.seek(at)
        known = b""
    else:
        known = head[at:]
        advance(file, max(0, at - len(head)))
    values = _Values(file, name, known, at, is_array=is_array)
    row = start.row
    while True:
        batch = RowBatch(file_name=name, start=replace(start, offset=values.offset, row=row, skip=0))
        for element in values.take(_BATCH_ROWS):
            row += 1
            _take(batch, element, row)
        if not batch.lines and not batch.bad:
            return
        yield batch


def _take(batch: RowBatch, element: bytes, row: int) -> None:
    try:
        value = orjson.loads(element)
    except orjson.JSONDecodeError as error:
        reason = f"not JSON: {error}"
    else:
        if type(value) is dict:
            batch.values.append(value)
            # A row laid out over several lines becomes one; any other is stored byte for byte.
            batch.lines.append(
                orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE) if b"\n" in element else element + b"\n"
            )
            batch.numbers.append(row)
            return
        reason = f"a JSON {type(value).__name__}, expected an object"
    batch.bad.append(BadRow(before=len(batch.lines), position=where(batch.file_name, row), reason=reason))


class _Values:
    """Cuts a stream into top-level values in one pass, knowing the byte offset it has come to."""

    def __init__(self, file: BinaryIO, name: str, known: bytes, offset: int, *, is_array: bool) -> None:
        self._file = file
        self._name = name
        self._buffer = known
        self._place = 0
        self._base = offset
        self._is_array = is_array
        self._ended = False

    @property
    def offset(self) -> int:
        """Where the next value starts, or the gap before it."""
        return self._base + self._place

    def take(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            value = self._next()
            if value is None:
                return
            yield value

    def _next(self) -> bytes | None:
        if self._ended:
            return None
        mark = self._skip_gap()
        if not mark:
            if self._is_array:
                raise SourceError(f"{self._name} ends before its array does: it is truncated")
            self._ended = True
            return None
        if mark == b"]":
            self._place += 1
            if not self._is_array or self._skip_gap():
                raise SourceError(f"{self._name}: something follows its array at byte {self.offset}: expected its end")
            self._ended = True
            return None
        end = self._nested_end() if mark in b'{["' else self._scalar_end()
        value = self._buffer[self._place : end]
        self._place = end
        return value

    def _skip_gap(self) -> bytes:
        """Pass over blanks and commas; the byte that follows, or nothing at the end of the file."""
        while True:
            gap = _GAP.match(self._buffer, self._place)
            assert gap is not None
            self._place = gap.end()
            if self._place < len(self._buffer):
                return self._buffer[self._place : self._place + 1]
            if not self._more():
                return b""

    def _nested_end(self) -> int:
        """Behind the object, array or string that starts here: brackets are counted, strings passed over."""
        at = depth = 0  # counted from here, because reading more moves the buffer
        in_string = False
        while True:
            mark = (_IN_STRING if in_string else _OUTSIDE).search(self._buffer, self._place + at)
            if mark is None or (mark[0] == b"\\" and mark.end() == len(self._buffer)):
                at = (len(self._buffer) if mark is None else mark.start()) - self._place
                if not self._more():
                    raise SourceError(
                        f"{self._name} ends in the middle of the value at byte {self.offset}: it is truncated"
                    )
                continue
            at = mark.end() - self._place
            if mark[0] == b"\\":
                at += 1
            elif mark[0] == b'"':
                in_string = not in_string
            else:
                depth += 1 if mark[0] in b"{[" else -1
            if depth <= 0 and not in_string:
                return self._place + at

    def _scalar_end(self) -> int:
        """Behind a number or word, or behind one byte of what is none."""
        while True:
            found = _SCALAR.match(self._buffer, self._place)
            end = found.end() if found else self._place + 1
            if end < len(self._buffer) or not self._more():
                return end

    def _more(self) -> bool:
        data = self._file.read(_READ_BYTES)
        self._base += self._place
        self._buffer = self._buffer[self._place :] + data
        self._place = 0
        return bool(data)

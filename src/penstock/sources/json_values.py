"""JSON files: an array of objects, or objects one after the other, however they are laid out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

import orjson

from penstock.errors import SourceError
from penstock.sources import lines as lines_module
from penstock.sources.base import BadRow, Cursor, RowBatch, where
from penstock.sources.streams import FAILURES, go_to, read_some
from penstock.sources.values import json_kind

_READ_BYTES = 1 << 20
_QUOTE, _BACKSLASH = b'"\\'
_BOM = b"\xef\xbb\xbf"
_GAP = re.compile(rb"[\s,]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BETWEEN_BRACKETS = re.compile(rb'[^{}\[\]"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^{}\[\]"]*+)*+', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\[\]{}]++")
_LINE_BREAK = re.compile(rb"[\r\n]\s*+")


def read_json(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one JSON file; memory is bounded by the largest row, not by the file.

    Rows are numbered by their place among the values: a file may be one line, or a row many.
    """
    values = _Values(file, name)
    if start.offset:
        values.go_on_at(start.offset)
    row = start.row
    while not values.ended:
        batch = RowBatch(file_name=name, start=replace(start, offset=values.offset, row=row, skip=0))
        stop = values.offset + lines_module.GROUP_BYTES
        try:
            while values.offset < stop and (element := values.next()) is not None:
                row += 1
                _take(batch, element, row)
        except FAILURES:
            yield batch
            raise
        yield batch


def _take(batch: RowBatch, element: bytes, row: int) -> None:
    try:
        value = orjson.loads(element)
    except orjson.JSONDecodeError as error:
        reason = f"not JSON: {error}"
    else:
        if type(value) is dict:
            # A row laid out over several lines becomes one; apart from that it is stored byte for byte. No string
            # can be touched by that: within one, a line break is written as an escape.
            batch.lines.append((_LINE_BREAK.sub(b"", element) if b"\n" in element else element) + b"\n")
            batch.values.append(value)
            batch.numbers.append(row)
            return
        reason = f"a JSON {json_kind(value)}, expected an object"
    batch.bad.append(BadRow(before=len(batch.lines), position=where(batch.file_name, row), reason=reason))


class _Values:
    """Cuts a stream into top-level values in one pass, knowing the byte offset it has come to."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._read = read_some(file)
        self._name = name
        self._buffer = bytearray()
        self._place = 0
        self._base = 0
        self.ended = False
        while len(self._buffer) < len(_BOM) and self._more():
            pass
        if self._buffer.startswith(_BOM):
            self._place = len(_BOM)
        self._is_array = self._skip_gap() == b"["
        self._place += self._is_array

    @property
    def offset(self) -> int:
        """Where the next value starts, or the gap before it."""
        return self._base + self._place

    def go_on_at(self, offset: int) -> None:
        """Pass over everything before a byte offset."""
        known = self._base + len(self._buffer)
        if offset <= known:
            self._place = offset - self._base
            return
        go_to(self._file, offset, given=known)
        self._buffer.clear()
        self._base, self._place = offset, 0

    def next(self) -> bytes | None:
        """The next value; None at the end."""
        mark = self._skip_gap()
        if not mark:
            if self._is_array:
                raise SourceError(f"{self._name} ends before its array does: it is truncated")
            self.ended = True
            return None
        if mark == b"]":
            if not self._is_array:
                raise SourceError(f"{self._name}: the ] at byte {self.offset} closes nothing: remove it")
            self._place += 1
            if self._skip_gap():
                raise SourceError(f"{self._name}: something follows its array at byte {self.offset}: expected its end")
            self.ended = True
            return None
        end = self._nested_end() if mark in b'{["' else self._scalar_end()
        value = bytes(memoryview(self._buffer)[self._place : end])
        self._place = end
        return value

    def _skip_gap(self) -> bytes:
        """Pass over blanks and commas; the byte that follows, or nothing at the end of the file."""
        while True:
            gap = _GAP.match(self._buffer, self._place)
            assert gap is not None
            self._place = gap.end()
            if self._place < len(self._buffer):
                return bytes(self._buffer[self._place : self._place + 1])
            if not self._more():
                return b""

    def _nested_end(self) -> int:
        """Behind the object, array or string that starts here: brackets are counted, strings passed over."""
        in_string = self._buffer[self._place] == _QUOTE
        depth, at = 0, int(in_string)  # counted from here, because reading more moves the buffer
        while True:
            passed = (_IN_STRING if in_string else _BETWEEN_BRACKETS).match(self._buffer, self._place + at)
            assert passed is not None
            at = passed.end() - self._place
            mark = self._buffer[passed.end()] if passed.end() < len(self._buffer) else _BACKSLASH
            if mark == _BACKSLASH:  # the end of the buffer, perhaps in the middle of an escape
                if not self._more():
                    raise SourceError(
                        f"{self._name} ends in the middle of the value at byte {self.offset}: it is truncated"
                    )
                continue
            at += 1
            if mark == _QUOTE:  # a string that goes on behind the buffer begins, or ends
                in_string = not in_string
            else:
                depth += 1 if mark in b"{[" else -1
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
        data = self._read(_READ_BYTES)
        self._base += self._place
        del self._buffer[: self._place]
        self._buffer += data
        self._place = 0
        return bool(data)

"""CSV and TSV: a header, then a record a row; values are strings, as they stand in the file.

Fields are quoted by ``"`` where they hold a delimiter, a quote (doubled) or a newline. A row is numbered by the line it
begins at, so that an editor finds it; the header counts. Blank lines are nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from penstock.errors import SourceError
from penstock.sources import lines as lines_module
from penstock.sources.base import BadRow, Cursor, RowBatch, refuse_unless_utf8, where
from penstock.sources.streams import FAILURES, go_to
from penstock.sources.values import json_line

_FIELD_CHARACTERS = 256 << 20
"""A longer field is no document but what follows a quote that nobody closed."""

_BOM = b"\xef\xbb\xbf"


def read_csv(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    return _read(file, name, start, ",")


def read_tsv(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    return _read(file, name, start, "\t")


class _Lines:
    """Lines for the csv module, which takes one at a time; knows how many bytes and lines it has handed out."""

    def __init__(self, file: BinaryIO) -> None:
        self._readline = file.readline
        self.offset = 0
        self.count = 0
        self.ended = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._readline()
        if not line:
            self.ended = True
            raise StopIteration
        if not self.offset:
            self.offset += len(line) - len(line.removeprefix(_BOM))
            line = line.removeprefix(_BOM)
        self.offset += len(line)
        self.count += 1
        return line.decode("utf-8", errors="surrogateescape")


def _read(file: BinaryIO, name: str, start: Cursor, delimiter: str) -> Iterator[RowBatch]:
    if csv.field_size_limit() < _FIELD_CHARACTERS:
        csv.field_size_limit(_FIELD_CHARACTERS)
    lines = _Lines(file)
    columns = _header(lines, name, delimiter)
    if columns is None:
        return
    if start.offset:
        go_to(file, start.offset, given=lines.offset)
        lines.offset, lines.count = start.offset, start.row
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    while not lines.ended:
        batch = RowBatch(file_name=name, start=replace(start, offset=lines.offset, row=lines.count, skip=0))
        try:
            _fill(batch, records, lines, columns)
        except FAILURES:
            yield batch
            raise
        yield batch


def _header(lines: _Lines, name: str, delimiter: str) -> list[str] | None:
    try:
        columns = next(filter(None, csv.reader(lines, delimiter=delimiter, strict=True)), None)
    except csv.Error as error:
        raise SourceError(f"{name}: its header cannot be read: {error}") from error
    if not columns:
        return None
    for column in columns:
        refuse_unless_utf8(column)
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise SourceError(f"{name}: its header names a column twice: {', '.join(map(repr, twice))}: rename one of them")
    return columns


def _fill(batch: RowBatch, records: Iterator[list[str]], lines: _Lines, columns: list[str]) -> None:
    """Take records until they are enough for a batch."""
    stop = lines.offset + lines_module.GROUP_BYTES
    while lines.offset < stop:
        number = lines.count + 1
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.ended or lines.offset - batch.start.offset > _FIELD_CHARACTERS:
                raise SourceError(
                    f"{where(batch.file_name, number)}: a quote in this row is never closed: close it, or double it "
                    "where it is part of the text"
                ) from error
            _set_aside(batch, number, f"not CSV: {error}")
            continue
        if len(record) == len(columns):
            _take(batch, number, dict(zip(columns, record, strict=True)))
        elif record:
            _set_aside(batch, number, f"{len(record)} fields, expected {len(columns)}")


def _take(batch: RowBatch, number: int, value: dict[str, Any]) -> None:
    try:
        line = json_line(value)
    except TypeError:
        _set_aside(batch, number, "not UTF-8")
        return
    batch.values.append(value)
    batch.lines.append(line)
    batch.numbers.append(number)


def _set_aside(batch: RowBatch, number: int, reason: str) -> None:
    batch.bad.append(BadRow(before=len(batch.lines), position=where(batch.file_name, number), reason=reason))

"""CSV and TSV: a header, then a record a row; values are strings, as they stand in the file."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import BinaryIO

from penstock.errors import SourceError
from penstock.sources.base import BadRow, Cursor, RowBatch, where
from penstock.sources.streams import advance
from penstock.sources.values import json_line

_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"


def read_csv(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    return _read(file, name, start, ",")


def read_tsv(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    return _read(file, name, start, "\t")


class _Lines:
    """Lines for the csv module, which takes one at a time; knows how many bytes and lines it has handed out."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        at_start = self.offset == 0
        self.offset += len(line)
        if at_start:
            line = line.removeprefix(_BOM)
        return line.decode("utf-8", errors="surrogateescape")


def _read(file: BinaryIO, name: str, start: Cursor, delimiter: str) -> Iterator[RowBatch]:
    csv.field_size_limit(sys.maxsize)  # a long document is no error
    lines = _Lines(file)
    columns = _header(lines, name, delimiter)
    if columns is None:
        return
    if start.offset:
        advance(file, start.offset) if file.seekable() else advance(file, start.offset - lines.offset)
        lines.offset = start.offset
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    row = start.row
    while True:
        batch = RowBatch(file_name=name, start=replace(start, offset=lines.offset, row=row, skip=0))
        taken = 0
        for record in islice(_records(records), _BATCH_ROWS):
            taken += 1
            if record == []:
                continue
            row += 1
            _take(batch, record, columns, row)
        if not taken:
            return
        yield batch


def _header(lines: _Lines, name: str, delimiter: str) -> list[str] | None:
    try:
        columns = next(csv.reader(lines, delimiter=delimiter, strict=True), None)
    except csv.Error as error:
        raise SourceError(f"{name}: its header cannot be read: {error}") from error
    if not columns:
        return None
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise SourceError(f"{name}: its header names a column twice: {', '.join(map(repr, twice))}: rename one of them")
    return columns


def _records(records: Iterator[list[str]]) -> Iterator[list[str] | str]:
    """Records as they come; one that cannot be read is its reason."""
    while True:
        try:
            yield next(records)
        except StopIteration:
            return
        except csv.Error as error:
            yield str(error)


def _take(batch: RowBatch, record: list[str] | str, columns: list[str], row: int) -> None:
    if isinstance(record, str):
        reason = f"not CSV: {record}"
    elif len(record) != len(columns):
        reason = f"{len(record)} fields, expected {len(columns)}"
    else:
        value = dict(zip(columns, record, strict=True))
        try:
            line = json_line(value)
        except TypeError:
            reason = "not UTF-8"
        else:
            batch.values.append(value)
            batch.lines.append(line)
            batch.numbers.append(row)
            return
    batch.bad.append(BadRow(before=len(batch.lines), position=where(batch.file_name, row), reason=reason))

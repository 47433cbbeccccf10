"""Plain text: a line a sample, or a whole file a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from penstock.sources.base import BadRow, Cursor, RowBatch, where
from penstock.sources.lines import line_groups


def read_text_lines(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one text file, a line each; a blank line is a sample."""
    for group in line_groups(file, start):
        batch = RowBatch(file_name=name, start=group.start)
        for number, line in enumerate(group.lines, group.start.row + 1):
            end = -2 if line.endswith(b"\r\n") else -1 if line.endswith(b"\n") else None
            _append(batch, line[:end], number, {})
        yield batch


def read_text_file(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """One row: the whole file, and its name beside it."""
    batch = RowBatch(file_name=name, start=start)
    _append(batch, file.read().removeprefix(b"\xef\xbb\xbf"), 0, {"path": name})
    yield batch


def _append(batch: RowBatch, data: bytes, number: int, extra: dict[str, str]) -> None:
    try:
        value = {"text": data.decode("utf-8"), **extra}
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        batch.bad.append(BadRow(before=len(batch.lines), position=where(batch.file_name, number), reason=reason))
        return
    batch.values.append(value)
    batch.numbers.append(number)
    batch.lines.append(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))

"""Rows without what they are needed for are bad rows: no text, or no tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.errors import SourceError
from penstock.sources.base import BadRow, RowBatch, where
from penstock.sources.columns import text_of
from penstock.sources.tokens import tokens_of


def set_textless_rows_aside(batch: RowBatch, column: str) -> None:
    """Move rows without text in the text column to the bad ones, keeping everything in order."""
    if not all(type(row.get(column)) is str for row in batch.values):
        _set_aside(batch, lambda row: text_of(row, column))


def set_tokenless_rows_aside(batch: RowBatch, column: str) -> None:
    """Move rows without token ids in the token column to the bad ones, keeping everything in order."""
    _set_aside(batch, lambda row: tokens_of(row, column))


def _set_aside(batch: RowBatch, check: Callable[[dict[str, Any]], object]) -> None:
    rest, batch.bad = deque(batch.bad), []
    lines, values, numbers = batch.lines, batch.values, batch.numbers
    batch.lines, batch.values, batch.numbers = [], [], []
    for index in range(len(lines)):
        while rest and rest[0].before <= index:
            batch.bad.append(replace(rest.popleft(), before=len(batch.lines)))
        try:
            check(values[index])
        except SourceError as error:
            position = where(batch.file_name, numbers[index])
            batch.bad.append(BadRow(before=len(batch.lines), position=position, reason=str(error)))
            continue
        batch.lines.append(lines[index])
        batch.values.append(values[index])
        batch.numbers.append(numbers[index])
    batch.bad += [replace(row, before=len(batch.lines)) for row in rest]

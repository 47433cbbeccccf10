"""Which column of a row is its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import SourceError

TEXT_COLUMNS = ("text", "content", "document", "article", "body", "passage", "sentence", "story", "code", "abstract")
"""Looked for in this order when the user names no column."""


def pick_text_column(rows: Sequence[dict[str, Any]], wanted: str | None) -> str:
    """Choose the text column from the first rows: the one the user names, else a well-known name."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if wanted is not None:
        if wanted in columns:
            return wanted
        raise SourceError(
            f"no column {wanted!r}: the rows have {_listed(columns)}; name one of them with --text-column"
        )
    for name in TEXT_COLUMNS:
        if any(isinstance(row.get(name), str) for row in rows):
            return name
    raise SourceError(f"no text column found among {_listed(columns)}: name it with --text-column")


def text_of(row: dict[str, Any], column: str) -> str:
    """The text of a row, or a SourceError that says why it has none."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    if column not in row:
        raise SourceError(f"no column {column!r}: the row has {_listed(list(row))}")
    raise SourceError(f"column {column!r} holds {type(value).__name__}, expected a string")


def _listed(columns: list[str]) -> str:
    return ", ".join(repr(column) for column in columns) or "no columns"

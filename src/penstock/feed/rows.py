"""Rows of a window: what packing makes, whichever way, and how rows of several windows become a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np

FieldName = Literal[
    "input_ids", "labels", "position_ids", "document_ids", "attention_mask", "cu_seqlens", "spans", "num_tokens"
]
FIELDS: tuple[FieldName, ...] = (
    "input_ids",
    "labels",
    "position_ids",
    "document_ids",
    "attention_mask",
    "cu_seqlens",
    "spans",
    "num_tokens",
)
_OF_SAMPLES = ("sample_ids", "source_ids", "spans")
_OF_ROWS = ("num_tokens", "row_sources")
"""Fields with an entry a sample, or a row; all others have one a token."""
BEGINS = "begins"
"""Where a piece, or its part of a row, begins: what `cu_seqlens` is made of once a batch is together."""
ONLY_IDS: tuple[FieldName, ...] = ("input_ids",)


class Rows(Protocol):
    """The rows of a window. Stateless."""

    def __len__(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def fields(self, names: tuple[FieldName, ...], rows: range | np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of these rows by name, with the ids of the samples whose last token stands in them. Rows that are
        no range are in ascending order."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether its tokens still lie where they were read from."""
        ...

    def token_counts(self, rows: range) -> np.ndarray:
        """Tokens of each row, filling left out."""
        ...

    def id_batches(self, start: int, size: int) -> Iterator[list[dict[str, Any]]]:
        """Batches of ids alone, of so many rows each, from a row on, some at a time: as far as it has them whole."""
        ...


def merge(shares: Sequence[dict[str, np.ndarray]], order: np.ndarray | None = None) -> dict[str, Any]:
    """Rows from several windows as one batch; in another order of their rows, where one is given."""
    if len(shares) == 1 and order is None and BEGINS not in shares[0]:
        return shares[0]
    batch: dict[str, Any] = shares[0] if len(shares) == 1 else _joined(shares)
    begins = batch.pop(BEGINS, None)
    ragged = begins is not None and begins.ndim == 1
    if order is not None:
        of_rows = [name for name in batch if name not in _OF_SAMPLES]
        places = order
        if begins is not None:
            places = _places(np.append(np.flatnonzero(begins), begins.size), order) if ragged else order
            begins = begins[places]
        for name in of_rows:
            batch[name] = batch[name][order if name in _OF_ROWS else places]
    if begins is not None:
        batch["cu_seqlens"] = np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
    return batch


def _places(bounds: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The places of rows of uneven length, laid end to end, in another order of the rows."""
    lengths = np.diff(bounds)[order]
    moved = np.repeat(bounds[order] - (np.cumsum(lengths) - lengths), lengths)
    return moved + np.arange(len(moved))


def _joined(shares: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def picked(rows: range | np.ndarray) -> slice | np.ndarray:
    """Rows as an index, a slice where they are a range."""
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows


def end_of(rows: range | np.ndarray) -> int:
    """Behind the last of them."""
    return int(rows[-1]) + 1 if len(rows) else 0

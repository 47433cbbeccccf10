"""A window's pieces as rows of uneven length, and any of them as flat arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.feed.gathered import as_array
from penstock.feed.gathering import reorder
from penstock.feed.labels import labels_of, plain_ids
from penstock.feed.pieces import Pieces
from penstock.feed.rows import BEGINS, FieldName, picked
from penstock.feed.token_store import TokenChunk


class RaggedRows:
    """A piece a row, as long as it is; a batch's rows lie end to end."""

    def __init__(self, parts: Pieces, *, masked: bool) -> None:
        self._parts = parts
        self._masked = masked
        self._rows = np.flatnonzero(np.diff(parts.offsets) > 0)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size_bytes(self) -> int:
        return self._parts.size_bytes

    @property
    def is_lazy(self) -> bool:
        return False

    def token_counts(self, rows: range) -> np.ndarray:
        return np.diff(self._parts.offsets)[self._rows[rows.start : rows.stop : rows.step]]

    def id_batches(self, start: int, size: int) -> Iterator[list[dict[str, Any]]]:
        return iter(())

    def fields(self, names: tuple[FieldName, ...], rows: range | np.ndarray) -> dict[str, np.ndarray]:
        parts = self._parts
        chosen = self._rows[picked(rows)]
        placed = reorder(TokenChunk(as_array(parts.ids), parts.offsets), chosen)
        ids, offsets = placed.ids, placed.offsets
        lengths = np.diff(offsets)
        made: dict[str, np.ndarray] = {BEGINS: np.zeros(len(ids), dtype=bool)}
        made[BEGINS][offsets[:-1]] = True
        if "input_ids" in names:
            made["input_ids"] = plain_ids(ids, masked=self._masked)
        if "labels" in names:
            labels = np.empty(len(ids), dtype=np.int64)
            labels[:-1] = labels_of(ids[1:], masked=self._masked)
            labels[offsets[1:] - 1] = parts.after[chosen]
            made["labels"] = labels
        if "position_ids" in names:
            made["position_ids"] = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
        if "document_ids" in names:
            made["document_ids"] = np.repeat(parts.documents[chosen], lengths)
        if "attention_mask" in names:
            made["attention_mask"] = np.ones(len(ids), dtype=np.int64)
        if "num_tokens" in names:
            made["num_tokens"] = lengths
        if "spans" in names:
            starts = parts.starts[chosen]
            made["spans"] = np.stack([parts.sample_ids[chosen], starts, starts + lengths], axis=1)
        made["sample_ids"] = self._sample_ids(rows)
        return made

    def _sample_ids(self, rows: range | np.ndarray) -> np.ndarray:
        """Of each row the sample that ends with it, and of the empty ones behind it; the first row has those before."""
        parts = self._parts
        behind = np.append(self._rows[1:], len(parts.ends))
        pieces = [
            parts.sample_ids[first:stop][parts.ends[first:stop]]
            for row in rows
            for first, stop in [(self._rows[row] if row else 0, behind[row])]
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *pieces])

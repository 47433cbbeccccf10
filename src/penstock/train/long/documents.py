"""Which keys the queries of a chunk may see: those before them, of their own document, within a window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """The documents of one sequence that a chunk touches, as queries and keys of one run each."""

    first_key: int
    """Where the document that the chunk begins in begins itself; keys follow from there without a gap."""
    query_ends: list[int]
    """Cumulative, from 0, of queries by document;"""
    key_ends: list[int]
    """and of keys."""


class Documents:
    """The documents of some sequences."""

    def __init__(self, document_ids: np.ndarray, device: torch.device, *, apart: bool = True) -> None:
        """Find where documents begin.

        Args:
            document_ids: ``(sequences, length)``; neighbours with equal ids are of one document.
            device: Where masks are wanted.
            apart: Whether documents are kept from seeing each other.
        """
        sequences, length = document_ids.shape
        begins = np.zeros((sequences, length), np.bool_)
        begins[:, 0] = True
        if apart:
            np.not_equal(document_ids[:, 1:], document_ids[:, :-1], out=begins[:, 1:])
        self._begins = begins
        self._device = device
        self.sequences = sequences
        self.length = length

    @cached_property
    def _starts(self) -> np.ndarray:
        """By token, where its document begins."""
        indices = np.where(self._begins, np.arange(self.length, dtype=np.int32), 0)
        return np.maximum.accumulate(indices, axis=1)

    @cached_property
    def _starts_on_device(self) -> Tensor:
        return torch.from_numpy(self._starts).to(self._device)

    @cached_property
    def whole(self) -> bool:
        """Whether every sequence is a single document."""
        return not self._begins[:, 1:].any()

    def first_key(self, start: int, window: int | None) -> int:
        """The first key that any query from `start` on may see."""
        first = int(self._starts[:, start].min())
        return first if window is None else max(first, start - window + 1, 0)

    def mask(self, start: int, stop: int, first_key: int, window: int | None) -> Tensor:
        """True where a query may see a key: ``(sequences, 1, stop - start, stop - first_key)``."""
        queries = torch.arange(start, stop, device=self._device)[:, None]
        keys = torch.arange(first_key, stop, device=self._device)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        if self.whole:
            return seen.expand(self.sequences, 1, -1, -1)
        return (seen & (keys >= self._starts_on_device[:, start:stop, None]))[:, None]

    def segments(self, start: int, stop: int) -> list[Segments]:
        """Of every sequence, the documents that a chunk touches."""
        return [self._segments(sequence, start, stop) for sequence in range(self.sequences)]

    def _segments(self, sequence: int, start: int, stop: int) -> Segments:
        first_key = int(self._starts[sequence, start])
        inner = np.flatnonzero(self._begins[sequence, start + 1 : stop]) + start + 1
        ends = [*inner.tolist(), stop]
        return Segments(
            first_key=first_key,
            query_ends=[0, *(end - start for end in ends)],
            key_ends=[0, *(end - first_key for end in ends)],
        )

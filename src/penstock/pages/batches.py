"""From pages' tokens to arrays of one shape, and what each holds.

    packed      documents end to end, cut every `sequence_length` tokens, over pages and rows alike: all tokens, once
    not packed  each document begins a row and is filled up to its end; a long one goes on in the next rows

Nothing is cut off. What fills up is marked: `lengths` says how much of each row is text; the rows that fill up the last
batch have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.pages.tokens import PageTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBatch:
    """One batch."""

    input_ids: np.ndarray
    """``(batch_size, sequence_length)``, int64."""
    lengths: np.ndarray
    """How many tokens of each row are text; what is behind them is filling."""
    done: tuple[tuple[int, int], ...]
    """How far each page is handed out with this batch: its place among the pages, and how many of its rows."""

    @property
    def mask(self) -> np.ndarray:
        """``(batch_size, sequence_length)``, true where there is text."""
        return np.arange(self.input_ids.shape[1]) < self.lengths[:, None]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class Laid:
    """A page's tokens as places to take from: single tokens where they are packed, rows where they are not."""

    def __init__(self, tokens: PageTokens, sequence_length: int, *, packed: bool) -> None:
        self.ids = tokens.ids
        self.packed = packed
        offsets = tokens.offsets
        if packed:
            self.count = len(tokens.ids)
            self._ends = offsets[1:]
            return
        lengths = np.diff(offsets)
        rows = -(-lengths // sequence_length)
        self._ends = np.cumsum(rows)
        self.count = int(self._ends[-1]) if len(rows) else 0
        number = np.arange(self.count) - np.repeat(self._ends - rows, rows)  # a row's place in its document
        self.starts = np.repeat(offsets[:-1], rows) + number * sequence_length
        self.lengths = np.minimum(np.repeat(offsets[1:], rows) - self.starts, sequence_length)

    def rows_done(self, place: int) -> int:
        """How many of the page's rows are handed out whole with the first `place` places of it."""
        return int(np.searchsorted(self._ends, place, side="right"))


class BatchFiller:
    """Fills batches from pages that come one after the other. Holds one batch that is not full."""

    def __init__(self, batch_size: int, sequence_length: int, pad_id: int, *, packed: bool) -> None:
        self._shape = batch_size, sequence_length
        self._pad_id = pad_id
        self._packed = packed
        self._room = batch_size * sequence_length if packed else batch_size
        """Places of a batch: tokens, or rows."""
        self._begin()

    def _begin(self) -> None:
        self._batch = np.empty(self._shape, dtype=np.int64)
        self._lengths = np.zeros(self._shape[0], dtype=np.int64)
        self._filled = 0
        self._done: dict[int, int] = {}

    def batches(self, pages: Iterable[PageTokens]) -> Iterator[PageBatch]:
        """Full batches as they get full; the last one filled up."""
        for number, tokens in enumerate(pages):
            laid = Laid(tokens, self._shape[1], packed=self._packed)
            at = 0
            while at < laid.count:
                count = min(self._room - self._filled, laid.count - at)
                self.put(laid, at, at + count)
                at += count
                self._done[number] = laid.rows_done(at)
                if self._filled == self._room:
                    yield self.finish()
            if not laid.count:
                self._done[number] = laid.rows_done(0)  # a page without a single text
        if self._filled:
            yield self.finish()

    @property
    def left(self) -> tuple[tuple[int, int], ...]:
        """Pages without texts behind the last batch, as `PageBatch.done` has them."""
        return tuple(self._done.items())

    def put(self, laid: Laid, first: int, last: int) -> None:
        """Take places ``[first, last)`` of a page."""
        if self._packed:
            self._batch.reshape(-1)[self._filled : self._filled + last - first] = laid.ids[first:last]
        else:
            width = self._shape[1]
            rows = self._batch[self._filled : self._filled + last - first]
            lengths, starts = laid.lengths[first:last], laid.starts[first:last]
            inside = np.arange(width) < lengths[:, None]
            rows[...] = self._pad_id
            rows[inside] = laid.ids[(starts[:, None] + np.arange(width))[inside]]
            self._lengths[self._filled : self._filled + last - first] = lengths
        self._filled += last - first

    def finish(self) -> PageBatch:
        """The batch as it is, filled up where it is not full."""
        if self._packed:
            self._batch.reshape(-1)[self._filled :] = self._pad_id
            width = self._shape[1]
            self._lengths = np.clip(self._filled - np.arange(self._shape[0]) * width, 0, width)
        else:
            self._batch[self._filled :] = self._pad_id
        batch = PageBatch(input_ids=self._batch, lengths=self._lengths, done=tuple(self._done.items()))
        self._begin()
        return batch

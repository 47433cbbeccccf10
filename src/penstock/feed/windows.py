"""Windows of the strided plan: which samples are packed together, in which order, and their tokens.

sequential, shard-local    whole chunks: read as they lie, joined, and put in the window's order
shuffled, numpy            a run of the order: samples from all over the data set
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.feed.gathered import Ids, gather
from penstock.feed.gathering import assemble
from penstock.feed.token_cache import TokenCache
from penstock.plans.orders import Order, ShardLocal

_LONG = 256
"""Tokens a sample, on average, from which on samples are gathered batch by batch."""


class Window(NamedTuple):
    """Samples that are packed together: their ids and their tokens, in the plan's order."""

    sample_ids: np.ndarray
    ids: Ids
    offsets: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The windows of one epoch: a function of the order and of a window's size."""

    order: Order
    window_samples: int
    """Samples a window, for orders that have no windows of their own."""
    excluded: np.ndarray
    """Samples left out of this epoch, sorted."""

    @property
    def window_count(self) -> int:
        if isinstance(self.order, ShardLocal):
            return self.order.window_count
        return -(-self.order.size // self.window_samples)

    def sample_ids(self, window: int) -> np.ndarray:
        """The samples of a window, in order, without the excluded ones."""
        if isinstance(self.order, ShardLocal):
            start, stop = self.order.window_start(window), self.order.window_start(window + 1)
        else:
            start = window * self.window_samples
            stop = min(start + self.window_samples, self.order.size)
        return self._allowed(self.order.at(np.arange(start, stop)))

    def read(self, window: int, cache: TokenCache) -> Window:
        """A window with its tokens."""
        if not isinstance(self.order, ShardLocal):
            sample_ids = self.sample_ids(window)
            numbers, places = np.divmod(sample_ids, cache.chunk_size)
            touched, of_part = np.unique(numbers, return_inverse=True)
            return self._assembled(cache, touched, of_part, places, sample_ids)
        size = self.order.chunk_size
        assert size == cache.chunk_size, "a chunk of the order is one of the cache"
        numbers = self.order.window_chunk_ids(window)
        of_part, places = self.order.window_order(window)
        sample_ids = numbers[of_part] * size + places
        if len(self.excluded):
            allowed = np.isin(sample_ids, self.excluded, assume_unique=True, invert=True)
            of_part, places, sample_ids = of_part[allowed], places[allowed], sample_ids[allowed]
        return self._assembled(cache, numbers, of_part, places, sample_ids)

    @staticmethod
    def _assembled(
        cache: TokenCache, numbers: np.ndarray, of_part: np.ndarray, places: np.ndarray, sample_ids: np.ndarray
    ) -> Window:
        chunks = cache.chunks(numbers.tolist())
        with cache.timings.of("pack"):
            if sum(len(chunk.ids) for chunk in chunks) >= _LONG * sum(len(chunk.offsets) for chunk in chunks):
                gathered = gather(chunks, of_part, places, cache.dtype)
                return Window(sample_ids, gathered, gathered.offsets)
            placed = assemble(chunks, of_part, places, cache.dtype, cache.buffers)
        return Window(sample_ids, placed.ids, placed.offsets)

    def _allowed(self, sample_ids: np.ndarray) -> np.ndarray:
        if not len(self.excluded):
            return sample_ids
        return sample_ids[np.isin(sample_ids, self.excluded, assume_unique=True, invert=True)]

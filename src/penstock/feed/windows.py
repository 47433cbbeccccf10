"""Windows of the strided plan: which samples are packed together, in which order, and their tokens.

sequential, shard-local    whole chunks: read as they lie, joined, and put in the window's order
shuffled, numpy            a run of the order: samples from all over the data set
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.feed.gathering import join, reorder
from penstock.feed.token_cache import TokenCache
from penstock.feed.token_store import TokenChunk
from penstock.plans.orders import Order, ShardLocal


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that are packed together: their ids and their tokens, in the plan's order."""

    sample_ids: np.ndarray
    ids: np.ndarray
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
            gathered = gather(cache, sample_ids)
            return Window(sample_ids, gathered.ids, gathered.offsets)
        size, total = self.order.chunk_size, self.order.size
        assert size == cache.chunk_size, "a chunk of the order is one of the cache"
        numbers = self.order.window_chunk_ids(window)
        chunks = cache.chunks(numbers.tolist())
        with cache.timings.of("pack"):
            joined = join(chunks, cache.dtype)
        lying = np.concatenate([np.arange(number * size, min((number + 1) * size, total)) for number in numbers])
        order = self.order.window_order(window)
        sample_ids = lying[order]
        if len(self.excluded):
            allowed = np.isin(sample_ids, self.excluded, assume_unique=True, invert=True)
            order, sample_ids = order[allowed], sample_ids[allowed]
        with cache.timings.of("pack"):
            placed = reorder(joined, order)
        return Window(sample_ids, placed.ids, placed.offsets)

    def _allowed(self, sample_ids: np.ndarray) -> np.ndarray:
        if not len(self.excluded):
            return sample_ids
        return sample_ids[np.isin(sample_ids, self.excluded, assume_unique=True, invert=True)]


def gather(cache: TokenCache, sample_ids: np.ndarray) -> TokenChunk:
    """The tokens of samples from anywhere, in this order. Costs a copy a sample, and a look at each chunk touched."""
    by_place = np.argsort(sample_ids, kind="stable")
    numbers, places = np.divmod(sample_ids[by_place], cache.chunk_size)
    parts = [  # a chunk at a time: together they may be the whole data set
        reorder(cache.chunks([number])[0], places[numbers == number]) for number in np.unique(numbers).tolist()
    ]
    back = np.empty(len(by_place), dtype=np.int64)
    back[by_place] = np.arange(len(by_place))
    return reorder(join(parts, cache.dtype), back)

"""The strided plan: the global batch first, then `[rank::world]` of it; the same batches on any number of ranks.

    order ──► positions without what is excluded ──► batch k = [kB, (k+1)B) ──► rank r takes [r::world]

Excluded samples leave gaps in the order that are closed up. An exclusion holds from a step on: what was handed out
before it stays as it was, what comes after it is the rest of the order without the excluded ones. So any batch of an
epoch is a function of (order, batch sizes, exclusions), and a resumed plan needs nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import ConfigError
from penstock.plans.orders import Order


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Samples that are left out, from a step of this epoch on; step 0 is its beginning."""

    step: int
    sample_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps between two changes: the order from `start` on, without the positions in `gaps`."""

    first_step: int
    batch_size: int
    start: int
    gaps: np.ndarray
    """Excluded positions at or behind `start`, sorted, each less how many come before it."""
    count: int
    """How many positions are left."""

    def positions(self, first: int, last: int) -> np.ndarray:
        """The positions of what is left, from the first-th to before the last-th."""
        wanted = np.arange(first, min(last, self.count), dtype=np.int64)
        return wanted + self.start + np.searchsorted(self.gaps, wanted, side="right")


class StridedEpoch:
    """The global batches of one epoch."""

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        exclusions: Iterable[Exclusion] = (),
        resized: Iterable[tuple[int, int]] = (),
        drop_last: bool = False,
    ) -> None:
        """Remember the epoch's shape.

        Args:
            order: Its order.
            batch_size: Samples of a global batch.
            exclusions: What is left out, and from when on.
            resized: Steps from which the batch size is another one, with that size.
            drop_last: Whether a last batch that would be short is left out.
        """
        self._sizes = dict([(0, batch_size), *resized])
        for size in self._sizes.values():
            if size < 1:
                raise ConfigError(f"batch_size={size} holds no sample: expected 1 or more")
        self.order = order
        self.drop_last = drop_last
        self._exclusions = list(exclusions)

    @property
    def batch_count(self) -> int:
        """Batches of this epoch, as its exclusions stand; the same for every rank."""
        return self._last_step_of(self._stretches[-1])

    def sample_ids(self, first_step: int, last_step: int | None = None) -> np.ndarray:
        """The samples of one batch, or of the batches ``[first_step, last_step)`` end to end; empty behind the end."""
        last_step = min(first_step + 1 if last_step is None else last_step, self.batch_count)
        pieces = [np.empty(0, dtype=np.int64)]
        step = first_step
        while step < last_step:
            number = bisect_right(self._stretches, step, key=lambda stretch: stretch.first_step) - 1
            stretch = self._stretches[number]
            following = self._stretches[number + 1 : number + 2]
            until = min(last_step, following[0].first_step) if following else last_step
            size = stretch.batch_size
            pieces.append(stretch.positions((step - stretch.first_step) * size, (until - stretch.first_step) * size))
            step = until
        return self.order.at(np.concatenate(pieces))

    def batches(self, first_step: int, last_step: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of several batches end to end, and where each batch begins (one more than batches)."""
        sizes = [self._size_of(step) for step in range(first_step, last_step)]
        return self.sample_ids(first_step, last_step), np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def _size_of(self, step: int) -> int:
        number = bisect_right(self._stretches, step, key=lambda stretch: stretch.first_step) - 1
        stretch = self._stretches[number]
        return min(stretch.batch_size, stretch.count - (step - stretch.first_step) * stretch.batch_size)

    def share(self, step: int, rank: int, world: int) -> np.ndarray:
        """What one rank gets of a batch; nothing where the batch has fewer samples than there are ranks before it."""
        if not 0 <= rank < world:
            raise ConfigError(f"rank={rank} is not in a world of {world}: expected 0 to {world - 1}")
        return self.sample_ids(step)[rank::world]

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        stretches: list[_Stretch] = []
        excluded = np.empty(0, dtype=np.int64)
        start = 0
        size = self._sizes[0]
        for step in sorted({*self._sizes, *(exclusion.step for exclusion in self._exclusions)}):
            if stretches:
                if step > self._last_step_of(stretches[-1]):
                    break  # the epoch was over by then; at its very end smaller batches may still take what is left
                start = self._end_of(stretches[-1], step)
            size = self._sizes.get(step, size)
            now = [exclusion.sample_ids for exclusion in self._exclusions if exclusion.step == step]
            if now:
                excluded = np.union1d(excluded, self.order.position_of(np.concatenate(now)))
            behind = excluded[np.searchsorted(excluded, start) :]
            gaps = behind - start - np.arange(len(behind))
            stretches.append(_Stretch(step, size, start, gaps, self.order.size - start - len(behind)))
        return stretches

    def _last_step_of(self, stretch: _Stretch) -> int:
        """The step behind the last one, if nothing else is excluded."""
        size = stretch.batch_size
        batches = stretch.count // size if self.drop_last else -(-stretch.count // size)
        return stretch.first_step + batches

    def _end_of(self, stretch: _Stretch, step: int) -> int:
        """The position behind the last that the steps before `step` have taken."""
        taken = min((step - stretch.first_step) * stretch.batch_size, stretch.count)
        return int(stretch.positions(taken - 1, taken)[0]) + 1 if taken else stretch.start

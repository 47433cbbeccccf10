"""The strided plan: the global batch first, then `[rank::world]` of it; the same batches on any number of ranks.

    order ──► positions without what is excluded ──► batch k = [kB, (k+1)B) ──► rank r takes [r::world]

Excluded samples leave gaps in the order that are closed up. An exclusion holds from a step on: what was handed out
before it stays as it was, what comes after it is the rest of the order without the excluded ones. So any batch of an
epoch is a function of (order, batch size, exclusions), and a resumed plan needs nothing else.
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
    """Steps between two exclusions: the order from `start` on, without the positions in `gaps`."""

    first_step: int
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
        self, order: Order, batch_size: int, *, exclusions: Iterable[Exclusion] = (), drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} holds no sample: expected 1 or more")
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._exclusions = sorted(exclusions, key=lambda exclusion: exclusion.step)

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
            size = self.batch_size
            pieces.append(stretch.positions((step - stretch.first_step) * size, (until - stretch.first_step) * size))
            step = until
        return self.order.at(np.concatenate(pieces))

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
        for step in sorted({0, *(exclusion.step for exclusion in self._exclusions)}):
            if stretches:
                if step >= self._last_step_of(stretches[-1]):
                    break  # the epoch was over by then
                start = self._end_of(stretches[-1], step)
            now = [exclusion.sample_ids for exclusion in self._exclusions if exclusion.step == step]
            if now:
                excluded = np.union1d(excluded, self.order.position_of(np.concatenate(now)))
            behind = excluded[np.searchsorted(excluded, start) :]
            gaps = behind - start - np.arange(len(behind))
            stretches.append(_Stretch(step, start, gaps, self.order.size - start - len(behind)))
        return stretches

    def _last_step_of(self, stretch: _Stretch) -> int:
        """The step behind the last one, if nothing else is excluded."""
        batches = stretch.count // self.batch_size if self.drop_last else -(-stretch.count // self.batch_size)
        return stretch.first_step + batches

    def _end_of(self, stretch: _Stretch, step: int) -> int:
        """The position behind the last that the steps before `step` have taken."""
        taken = min((step - stretch.first_step) * self.batch_size, stretch.count)
        return int(stretch.positions(taken - 1, taken)[0]) + 1 if taken else stretch.start

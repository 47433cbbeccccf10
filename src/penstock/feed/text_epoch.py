"""One epoch of texts: global batches of samples, each rank's share read from the blocks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from penstock.feed.prefetch import Prefetch
from penstock.feed.state import LoaderState
from penstock.feed.steps import Step
from penstock.feed.texts import SampleReader
from penstock.feed.timings import Timings
from penstock.plans.orders import Order
from penstock.plans.strided import Exclusion, StridedEpoch

_STEPS_AT_A_TIME = 256
"""How many batches' ids are worked out together: alone, the arithmetic would cost more than the reading."""


class TextEpoch:
    """Batches of one epoch, as lists of texts with their sample ids."""

    def __init__(
        self,
        reader: SampleReader,
        order: Order,
        batch_size: int,
        *,
        state: LoaderState,
        drop_last: bool,
        timings: Timings,
    ) -> None:
        self._reader = reader
        self._timings = timings
        exclusions = [
            Exclusion(entry.step if entry.epoch == state.epoch else 0, entry.sample_ids)
            for entry in state.exclusions
            if entry.epoch <= state.epoch
        ]
        self._plan = StridedEpoch(
            order, batch_size, exclusions=exclusions, resized=state.batch_sizes, drop_last=drop_last
        )

    @property
    def batch_count(self) -> int:
        return self._plan.batch_count

    def batch(self, step: int, rank: int, world: int) -> dict[str, Any]:
        return self._reader.batch(self._plan.share(step, rank, world))[0]

    def steps_ahead(self, first: int, rank: int, world: int, budget_bytes: int) -> Generator[Step, None, None]:
        """The epoch's batches from a step on, made ahead in a thread."""
        ahead = Prefetch(
            self.steps(first, rank, world),
            budget_bytes=budget_bytes,
            size_of=lambda step: step.size_bytes,
            on_wait=self._timings.waited,
        )
        try:
            yield from ahead
        finally:
            ahead.close()

    def steps(self, first: int, rank: int, world: int) -> Iterator[Step]:
        """The epoch's batches from a step on."""
        for start in range(first, self.batch_count, _STEPS_AT_A_TIME):
            stop = min(start + _STEPS_AT_A_TIME, self.batch_count)
            ids, bounds = self._plan.batches(start, stop)
            for step in range(start, stop):
                mine = ids[bounds[step - start] : bounds[step - start + 1]][rank::world]
                batch, size = self._reader.batch(mine)
                yield Step(batch, size, {"step": step + 1})

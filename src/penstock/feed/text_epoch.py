"""One epoch of texts: global batches of samples, each rank's share read from the blocks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.blocks import BlockManager
from penstock.feed.prefetch import Prefetch
from penstock.feed.ranges import BlockRanges
from penstock.feed.state import LoaderState
from penstock.feed.texts import SampleReader
from penstock.feed.timings import Timings
from penstock.plans.orders import Order
from penstock.plans.strided import Exclusion, StridedEpoch

_STEPS_AT_A_TIME = 256
"""How many batches' ids are worked out together: alone, the arithmetic would cost more than the reading."""


@dataclass(frozen=True, slots=True)
class Step:
    """A batch for one rank, and where the loader stands once it was handed out."""

    batch: dict[str, Any]
    size_bytes: int
    next_step: int
    window: int = 0
    offset: int = 0


class TextEpoch:
    """Batches of one epoch, as lists of texts with their sample ids."""

    def __init__(
        self,
        blocks: BlockManager,
        ranges: BlockRanges,
        order: Order,
        batch_size: int,
        *,
        state: LoaderState,
        drop_last: bool,
        chunk_size: int,
        cache_bytes: int,
        timings: Timings,
    ) -> None:
        self._has_text = blocks.manifest.header.text_column is not None
        self._timings = timings
        self._reader = SampleReader(blocks, ranges, chunk_size=chunk_size, cache_bytes=cache_bytes, timings=timings)
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
        return self._read(self._plan.share(step, rank, world))[0]

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
                batch, size = self._read(mine)
                yield Step(batch, size, step + 1)

    def _read(self, sample_ids: np.ndarray) -> tuple[dict[str, Any], int]:
        rows = self._reader.rows(sample_ids)
        if not self._has_text:
            return {"rows": rows, "sample_ids": sample_ids}, 1024 * len(rows)
        texts = self._reader.texts_of(rows)
        return {"text": texts, "sample_ids": sample_ids}, sum(map(len, texts)) + 64 * len(texts)

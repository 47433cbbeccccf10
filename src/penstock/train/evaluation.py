"""Evaluation: the mean loss of a state over data it does not learn from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from penstock.blocks import BlockManager
from penstock.feed import ChunkFeed
from penstock.train.device_batch import DeviceBatch
from penstock.train.events import Events
from penstock.train.staging import Staging
from penstock.train.trainer import Trainer
from penstock.types import ChunkRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """How well a state predicts the evaluation data."""

    loss: float
    """Mean over tokens, not over batches: uneven ones weigh right."""
    num_tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluation:
    """Evaluates states of a trainer every so many steps, at commits, and remembers which it has done."""

    def __init__(
        self, feed: ChunkFeed, blocks: BlockManager, *, every: int, batches: int | None, done_at: int, events: Events
    ) -> None:
        """Remember what to do.

        Args:
            feed: Over the evaluation data.
            blocks: The evaluation data.
            every: Steps of the run between evaluations; 0 for none before the end.
            batches: How many at most; None for all.
            done_at: The run's step before which nothing is to be evaluated.
            events: Who is told.
        """
        self._feed = feed
        self._blocks = blocks
        self._every = every
        self._batches = batches
        self._done_at = done_at
        self._events = events

    def after_commit(self, trainer: Trainer, total_steps: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Evaluate where this commit is the first behind another `every` steps."""
        if self._every and total_steps // self._every > self._done_at // self._every:
            self.at_end(trainer, total_steps, stop)

    def at_end(self, trainer: Trainer, total_steps: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Evaluate, unless this very state was evaluated already; given up once `stop` says so."""
        if total_steps <= self._done_at:
            return
        self._done_at = total_steps
        found = self.evaluate(trainer, stop)
        if found is None:
            return
        self._events.emit(
            "eval",
            total_steps=total_steps,
            loss=round(found.loss, 6),
            perplexity=round(found.perplexity, 4),
            num_tokens=found.num_tokens,
            eval_s=round(found.seconds, 3),
        )

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, stop: Callable[[], bool] = lambda: False) -> Evaluated | None:
        """The mean loss over the data; neither weights nor random numbers are touched. None where it was given up."""
        began = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=trainer.device)
        num_tokens = 0
        staging = Staging(self._feed, trainer.device)
        trainer.model.eval()
        try:
            for batch in islice(self._all(staging), self._batches):
                if stop():
                    return None
                total += trainer.loss_sum(batch)
                num_tokens += batch.num_tokens
        finally:
            trainer.model.train()
            staging.close()
        return Evaluated(
            loss=total.item() / max(1, num_tokens), num_tokens=num_tokens, seconds=time.perf_counter() - began
        )

    def _all(self, staging: Staging) -> Iterator[DeviceBatch]:
        for block_id in range(len(self._blocks.manifest.blocks)):
            count = self._blocks.get_block(block_id).chunk_count(self._blocks.dataset_chunk_size)
            for chunk_id in range(count):
                for batch, _ in staging.batches(ChunkRef(block_id, chunk_id), 0):
                    yield batch

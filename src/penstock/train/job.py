"""A job: ranks that learn every global batch together, each its share, and commit as one worker.

    each rank:  share ──► agree (stop? commit due?) ──► forward, backward ──► gradients summed ──► the same step
    rank 0:     claims or asks the loader, commits checkpoint and progress, tells events; the others wait for its word

Every rank passes the same collectives in the same order, whatever it was dealt: an empty share takes part like any
other. What ends or interrupts the loop is agreed on before a step, so all ranks stop at the same one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch

from penstock.faults import reach
from penstock.feed import Batch
from penstock.ledger import Lease, Session
from penstock.train.alone import tell_commit
from penstock.train.committing import Committer, StopReason
from penstock.train.config import TrainingConfig
from penstock.train.courses import Course
from penstock.train.evaluation import Evaluation
from penstock.train.events import Events
from penstock.train.ranks import Ranks
from penstock.train.stopping import StopRequest, StopWish
from penstock.train.trainer import StepResult, Trainer

_IDLE_S = 0.5


class Keeper:
    """What rank 0 does for all: commits, and tells events."""

    def __init__(
        self,
        committer: Committer,
        events: Events,
        session: Session,
        stop: StopRequest,
        evaluation: Evaluation | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.committer = committer
        self.events = events
        self.session = session
        self._stop = stop
        self._evaluation = evaluation
        self._on_progress = on_progress

    def started(self, world: int) -> None:
        self.events.emit(
            "worker_started", worker=self.session.worker, session=self.session.session_id, pid=os.getpid(), ranks=world
        )

    def commit(self, course: Course, trainer: Trainer, *, stop: StopWish | None, idle: bool) -> dict[str, Any]:
        """Commit what there is; whether the run is over, and what else all ranks are to know."""
        began = time.perf_counter()
        made = course.commit(self.committer, trainer.state())
        if made is not None:
            tell_commit(self.events, made[0], made[1], [self.session.worker], began)
        elif idle:
            self._stop.wait(_IDLE_S)  # more blocks are on their way
        reason = self.committer.stop_reason(stop_requested=stop)
        if self._evaluation is not None and made is not None and reason is None:
            self._evaluation.after_commit(trainer, made[0].total_steps, self._gives_up)
        elif self._evaluation is not None and reason in ("steps", "epoch"):
            self._evaluation.at_end(trainer, self.committer.ledger.status().total_steps, self._gives_up)
        return {"reason": reason, **course.changes()}

    def _gives_up(self) -> bool:
        """Asked before every batch of an evaluation, which may take longer than any step: that is progress too."""
        self._on_progress()
        return self._stop.requested()

    def tell_step(
        self, course: Course, step: int, result: StepResult, *, samples: int, step_s: float, wait_s: float
    ) -> None:
        place = course.place()
        self.events.emit(
            "step",
            step=step,
            **result.told(step_s, wait_s),
            worker=self.session.worker,
            session=self.session.session_id,
            epoch=place.epoch,
            samples_done=samples,
            **place.about,
        )

    def tell_chunk(self, lease: Lease) -> None:
        self.events.emit(
            "chunk",
            worker=self.session.worker,
            session=self.session.session_id,
            epoch=lease.epoch,
            block_id=lease.ref.block_id,
            chunk_id=lease.ref.chunk_id,
            samples=lease.samples - lease.start,
        )


class Job:
    """The training loop of one rank."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        config: TrainingConfig,
        trainer: Trainer,
        course: Course,
        keeper: Keeper | None,
        total_steps: int,
        stop: StopRequest,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Remember what takes part.

        Args:
            ranks: This rank among the others.
            config: The run's, the same on all ranks.
            trainer: At the state of the last commit, the same on all ranks.
            course: Where it stood at the last commit.
            keeper: Of rank 0; None on the others.
            total_steps: Of the run, at the last commit.
            stop: A wish of this rank stops all of them.
            on_progress: Called before every step.
        """
        self._ranks = ranks
        self._config = config
        self._trainer = trainer
        self._course = course
        self._keeper = keeper
        self._total_steps = total_steps
        self._stop = stop
        self._on_progress = on_progress
        self._committed_at = time.monotonic()
        self._waits_since = self._waited_s = 0.0

    def run(self) -> StopReason:
        """Learn until the run is over; every rank returns the same reason."""
        if self._keeper is not None:
            self._keeper.started(self._ranks.world)
        told = self._ranks.from_first(self._course.changes)
        self._course.committed(told)
        while True:
            steps = self._total_steps
            with closing(self._course.shares()) as shares:  # what was made ahead ends with the loop
                reason = self._learn(shares)
            if reason is not None:
                return reason
            stop, _, _ = self._agree(None)
            reason = self._commit(stop, idle=not stop and self._total_steps == steps)
            if reason is not None:
                return reason

    def _learn(self, shares: Iterator[Batch]) -> StopReason | None:
        """Learn shares to where they end; why the run is over, where it is before that."""
        steps, self._waits_since = self._total_steps, time.perf_counter()
        for share in shares:
            self._waited_s = time.perf_counter() - self._waits_since
            stop, due, samples = self._agree(share)
            # A commit that is merely due waits for a step, or nothing would ever get done.
            if stop or (due and self._total_steps > steps):
                reason = self._commit(stop, idle=False)
                if reason is not None:
                    return reason
                steps = self._total_steps
            self._step(share, samples)
            self._waits_since = time.perf_counter()
            if self._total_steps == self._config.steps:
                next(shares, None)  # the last step may be the epoch's last too: the commit is to know
                break
        return None

    def _agree(self, share: Batch | None) -> tuple[StopWish | None, bool, int]:
        """Whether somebody wishes to stop, whether rank 0 finds a commit due, and the samples of all shares."""
        self._on_progress()
        why = self._stop.requested_by()
        due = self._ranks.is_first and time.monotonic() - self._committed_at >= self._config.commit_every_s
        samples = len(share.sample_ids) if share is not None else 0
        signal, file, is_due, samples = self._ranks.total([why == "signal", why == "file", due, samples])
        return "signal" if signal else "file" if file else None, bool(is_due), int(samples)

    def _step(self, share: Batch, samples: int) -> None:
        began = time.perf_counter()
        step = self._course.next_step() if self._keeper is not None else 0
        if self._ranks.rank:  # rank 0's generator is the run's own; the others draw by step, or all would draw the same
            torch.manual_seed(_seed(self._config.seed, self._total_steps, self._ranks.rank))
        together = self._ranks if self._ranks.world > 1 else None
        result = self._trainer.step(share, self._total_steps + 1, together)
        reach("train.after_step")
        if self._keeper is not None:
            step_s = time.perf_counter() - began
            self._keeper.tell_step(self._course, step, result, samples=samples, step_s=step_s, wait_s=self._waited_s)
        self._course.learned(share, samples)
        self._total_steps += 1

    def _commit(self, stop: StopWish | None, *, idle: bool) -> StopReason | None:
        self._ranks.require_equal(self._trainer.tensors_alike())
        told = self._ranks.from_first(lambda: self._first.commit(self._course, self._trainer, stop=stop, idle=idle))
        self._course.committed(told)
        self._committed_at = time.monotonic()
        return told["reason"]

    @property
    def _first(self) -> Keeper:
        assert self._keeper is not None, "rank 0 alone commits"
        return self._keeper


def _seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little") >> 1

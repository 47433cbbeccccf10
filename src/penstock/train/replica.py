"""The training loop: claim a chunk, learn its batches, complete it, meet at the boundary."""

from __future__ import annotations

import os
import time
from typing import Protocol

import numpy as np

from penstock.errors import LeaseLost
from penstock.faults import reach
from penstock.feed import Batch, ChunkFeed
from penstock.ledger import Lease, Ledger, Progress, Session
from penstock.train.config import TrainingConfig
from penstock.train.events import Events
from penstock.train.heartbeat import Heartbeat
from penstock.train.trainer import Trainer


class Boundary(Protocol):
    """Where replicas become one committed state again."""

    def stop_requested(self) -> bool:
        """Whether the run is to end: come here after the current step, and begin nothing new."""
        ...

    def is_due(self) -> bool:
        """Whether to come here after the current step, because the last commit is long ago or the run is to end."""
        ...

    def meet(self, trainer: Trainer, session: Session) -> bool:
        """Commit what was trained; afterwards `trainer` is at the committed state. False ends the run."""
        ...

    def rejoin(self, trainer: Trainer, session: Session) -> bool:
        """Discard what was trained and take up the last committed state. False ends the run."""
        ...


class Replica:
    """One worker with its own weights."""

    def __init__(
        self,
        *,
        worker: str,
        generation: int,
        config: TrainingConfig,
        ledger: Ledger,
        feed: ChunkFeed,
        trainer: Trainer,
        boundary: Boundary,
        events: Events,
    ) -> None:
        self._worker = worker
        self._generation = generation
        self._config = config
        self._ledger = ledger
        self._feed = feed
        self._trainer = trainer
        self._boundary = boundary
        self._events = events

    def run(self) -> None:
        """Train until the boundary says it is over. A fenced replica comes back as a new session."""
        fenced = False
        while True:
            session = self._ledger.join(self._worker, generation=self._generation, pid=os.getpid())
            self._events.emit("worker_started", worker=self._worker, session=session.session_id, pid=os.getpid())
            with Heartbeat(self._ledger, session, every_s=self._config.session_timeout_s / 4):
                try:
                    # What a fenced replica learned went back to the others: it takes up the common state first.
                    if not fenced or self._boundary.rejoin(self._trainer, session):
                        self._train(session)
                    self._ledger.leave(session)
                    return
                except LeaseLost as error:
                    fenced = True
                    self._events.emit(
                        "worker_lost",
                        worker=self._worker,
                        session=session.session_id,
                        pid=os.getpid(),
                        reason=str(error),
                    )

    def _train(self, session: Session) -> None:
        open_lease: Lease | None = None
        while True:
            if open_lease is None and not self._boundary.stop_requested():
                claimed = self._ledger.claim(session, round_chunks=self._config.commit_every_chunks)
                if isinstance(claimed, list):
                    open_lease = claimed[0]
            if open_lease is not None:
                open_lease = self._learn(session, open_lease)
                if open_lease is None and not self._boundary.is_due():
                    continue
            if not self._boundary.meet(self._trainer, session):
                return

    def _learn(self, session: Session, lease: Lease) -> Lease | None:
        """Learn a chunk from where its lease starts. Returns what is left of it where a boundary comes in between."""
        progress = Progress(samples=lease.start, offset=lease.start_offset, steps=0)
        for steps, batch in enumerate(self._feed.batches(lease.ref, lease.start_offset, lease.excluded), 1):
            # A boundary that is merely due waits for a step, or nothing would ever get done.
            pause = self._boundary.stop_requested() or (steps > 1 and self._boundary.is_due())
            step = None if pause else self._ledger.take_step(session, self._config.steps)
            if step is None:
                self._ledger.record(lease, progress)
                return lease._replace(start=progress.samples, start_offset=progress.offset)
            self._step(session, lease, batch, step)
            progress = Progress(samples=batch.samples_done, offset=batch.stop_offset, steps=steps)
        self._ledger.complete(lease, progress)
        self._events.emit(
            "chunk",
            worker=self._worker,
            session=session.session_id,
            epoch=lease.epoch,
            block_id=lease.ref.block_id,
            chunk_id=lease.ref.chunk_id,
            samples=lease.samples - lease.start,
        )
        return None

    def _step(self, session: Session, lease: Lease, batch: Batch, step: int) -> None:
        began = time.perf_counter()
        result = self._trainer.step(batch)
        reach("train.after_step")
        self._events.emit(
            "step",
            step=step,
            loss=round(result.loss, 6),
            num_tokens=result.num_tokens,
            step_s=round(time.perf_counter() - began, 6),
            worker=self._worker,
            session=session.session_id,
            epoch=lease.epoch,
            block_id=lease.ref.block_id,
            chunk_id=lease.ref.chunk_id,
            start_offset=batch.start_offset,
            samples=id_ranges(batch.spans[:, 0]),
        )


def id_ranges(ids: np.ndarray) -> list[list[int]]:
    """Ascending ids as ranges from and to; nearly always one."""
    gaps = np.flatnonzero(np.diff(ids) > 1)
    return [[int(ids[first]), int(ids[last]) + 1] for first, last in zip([0, *(gaps + 1)], [*gaps, -1], strict=True)]

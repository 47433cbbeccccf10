"""The training loop: claim a chunk, learn its batches, complete it, meet at the boundary."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import Protocol

import numpy as np

from penstock.errors import LeaseLost
from penstock.faults import reach
from penstock.ledger import Lease, Ledger, Progress, Session
from penstock.train.config import TrainingConfig
from penstock.train.device_batch import DeviceBatch
from penstock.train.evaluation import Evaluation
from penstock.train.events import Events
from penstock.train.heartbeat import Heartbeat
from penstock.train.staging import Staging
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
        staging: Staging,
        trainer: Trainer,
        boundary: Boundary,
        events: Events,
        evaluation: Evaluation | None = None,
    ) -> None:
        self._worker = worker
        self._generation = generation
        self._config = config
        self._ledger = ledger
        self._staging = staging
        self._trainer = trainer
        self._boundary = boundary
        self._events = events
        self._evaluation = evaluation
        self._ahead: Lease | None = None
        """Claimed while another chunk is learned, so that it is ready by then; several workers only."""

    def run(self) -> None:
        """Train until the boundary says it is over. A fenced replica comes back as a new session."""
        fenced = False
        while True:
            session = self._ledger.join(self._worker, generation=self._generation, pid=os.getpid())
            self._events.emit(
                "worker_started", worker=self._worker, session=session.session_id, pid=os.getpid(), ranks=1
            )
            with Heartbeat(self._ledger, session, every_s=self._config.session_timeout_s / 4):
                try:
                    # What a fenced replica learned went back to the others: it takes up the common state first.
                    if not fenced or self._boundary.rejoin(self._trainer, session):
                        self._train(session)
                    self._ledger.leave(session)
                    self._staging.close()
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
        self._ahead = None
        while True:
            if open_lease is None:
                open_lease, self._ahead = self._ahead, None
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
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate the state everybody goes on from, where that is due and this replica's to do."""
        last = self._ledger.last_commit() if self._evaluation is not None else None
        if last is not None and self._evaluation is not None:
            self._evaluation.after_commit(self._trainer, last.total_steps, self._boundary.stop_requested)

    def _learn(self, session: Session, lease: Lease) -> Lease | None:
        """Learn a chunk from where its lease starts. Returns what is left of it where a boundary comes in between."""
        progress = Progress(samples=lease.start, offset=lease.start_offset, steps=0)
        staged = self._staging.batches(lease.ref, lease.start_offset, lease.excluded)
        looked_ahead = False
        with closing(staged):
            for steps, (batch, wait_s) in enumerate(staged, 1):
                # A boundary that is merely due waits for a step, or nothing would ever get done.
                pause = self._boundary.stop_requested() or (steps > 1 and self._boundary.is_due())
                step = None if pause else self._ledger.take_step(session, self._config.steps)
                if step is None:
                    self._ledger.record(lease, progress)
                    return lease._replace(start=progress.samples, start_offset=progress.offset)
                self._step(session, lease, batch, step, wait_s)
                done = batch.source
                progress = Progress(samples=done.samples_done, offset=done.stop_offset, steps=steps)
                if not looked_ahead and 2 * done.stop_offset >= self._staging.sequence_count:
                    looked_ahead = True
                    self._look_ahead(session, lease)
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

    def _look_ahead(self, session: Session, lease: Lease) -> None:
        """Have the next chunk ready when this one, of which half is done, is.

        Alone it is the one that follows, nearly always, and nothing is lost where it is not. Among several only a claim
        says whose it is; it is made as late as this, so that a fast worker still finds chunks to take.
        """
        if not self._config.parallel_independent:
            self._staging.prepare_following(lease.ref)
            return
        claimed = self._ledger.claim(session, round_chunks=self._config.commit_every_chunks)
        if isinstance(claimed, list):
            self._ahead = claimed[0]
            self._staging.prepare(self._ahead.ref, self._ahead.excluded)

    def _step(self, session: Session, lease: Lease, batch: DeviceBatch, step: int, wait_s: float) -> None:
        began = time.perf_counter()
        result = self._trainer.step(batch, step)
        reach("train.after_step")
        step_s = time.perf_counter() - began
        self._events.emit(
            "step",
            step=step,
            **result.told(step_s, wait_s),
            worker=self._worker,
            session=session.session_id,
            epoch=lease.epoch,
            batch=None,
            block_id=lease.ref.block_id,
            chunk_id=lease.ref.chunk_id,
            start_offset=batch.source.start_offset,
            samples=id_ranges(batch.source.spans[:, 0]),
            samples_done=len(batch.source.sample_ids),
        )


def id_ranges(ids: np.ndarray) -> list[list[int]]:
    """Ascending ids as ranges from and to; nearly always one."""
    gaps = np.flatnonzero(np.diff(ids) > 1)
    return [[int(ids[first]), int(ids[last]) + 1] for first, last in zip([0, *(gaps + 1)], [*gaps, -1], strict=True)]

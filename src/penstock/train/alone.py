"""The boundary of a run with one worker: save, commit, go on."""

from __future__ import annotations

import time

from penstock.errors import CheckpointError
from penstock.ledger import Commit, Session
from penstock.train.committing import Committer, StopReason
from penstock.train.events import Events
from penstock.train.ranks import Ranks
from penstock.train.stopping import StopRequest
from penstock.train.trainer import Trainer

_IDLE_S = 0.5


class CommitAlone:
    """Commits the one replica there is."""

    def __init__(self, committer: Committer, events: Events, stop: StopRequest) -> None:
        self._committer = committer
        self._events = events
        self._stop = stop
        self._met_at = time.monotonic()
        self.reason: StopReason | None = None

    def stop_requested(self) -> bool:
        return self._stop.requested()

    def is_due(self) -> bool:
        return self._stop.requested() or time.monotonic() - self._met_at >= self._committer.config.commit_every_s

    def meet(self, trainer: Trainer, session: Session) -> bool:
        work = [work for work in self._committer.ledger.pending() if work.session_id == session.session_id]
        if any(done.steps for done in work):
            began = time.perf_counter()
            commit = self._committer.commit(trainer.state(), [session.session_id])
            tell_commit(self._events, commit, sum(done.samples for done in work), [session.worker], began)
        elif not self._stop.requested():
            self._stop.wait(_IDLE_S)  # more blocks are on their way
        self.reason = self._committer.stop_reason(stop_requested=self._stop.requested_by())
        self._met_at = time.monotonic()
        return self.reason is None

    def rejoin(self, trainer: Trainer, session: Session) -> bool:
        last = self._committer.ledger.last_commit()
        if last is None:
            raise CheckpointError("the run has no commit to take up again")
        trainer.begin(self._committer.checkpoints.parts(last.checkpoint_id, last.digest), Ranks())
        return True


def tell_commit(events: Events, commit: Commit, samples: int, workers: list[str], began: float) -> None:
    events.emit(
        "commit",
        checkpoint_id=commit.checkpoint_id,
        total_steps=commit.total_steps,
        epoch=commit.epoch,
        samples=samples,
        workers=workers,
        commit_s=round(time.perf_counter() - began, 6),
    )

"""The commit: a checkpoint, then one ledger transaction that names it; in that order, so the ledger is the truth."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import orjson

from penstock.errors import CheckpointError
from penstock.faults import reach
from penstock.ledger import Commit, Ledger, LoaderProgress
from penstock.train.checkpoints import Checkpoints
from penstock.train.config import TrainingConfig
from penstock.train.stopping import StopWish
from penstock.train.trainer import State

_log = logging.getLogger(__name__)

StopReason = Literal["steps", "epoch", "signal", "file"]


@dataclass(slots=True)
class Committer:
    """Commits states, goes back to them, and says when a run is over."""

    ledger: Ledger
    checkpoints: Checkpoints
    config: TrainingConfig

    def commit(self, state: State, sessions: list[int], loader: LoaderProgress | None = None) -> Commit:
        """Make a state and what these sessions have trained durable together; of a loader's batches, with its state.

        Killed before the ledger's transaction, the checkpoint is an orphan that the next start removes; killed after
        it, the commit stands. There is nothing in between.
        """
        reach("train.before_checkpoint")
        pending = [work for work in self.ledger.pending() if work.session_id in sessions]
        last = self.ledger.last_commit()
        total_steps = (last.total_steps if last else 0) + sum(work.steps for work in pending)
        total_steps += loader.steps if loader else 0
        checkpoint_id = f"{total_steps:08d}"
        digest = self.checkpoints.write(checkpoint_id, state, {"total_steps": total_steps})
        reach("train.before_commit")
        commit = self.ledger.commit(checkpoint_id, digest, sessions, loader=loader)
        reach("train.after_commit")
        self._prune()
        return commit

    def go_back(self, *, read: bool = True) -> tuple[State | None, Commit, int] | None:
        """Restore the newest commit whose checkpoint is sound: its state, the commit, and the new generation.

        None where nothing was ever committed.

        Args:
            read: Whether the state is wanted as a whole; else it is only looked through.
        """
        commits = self.ledger.commits()
        kept = set(self.checkpoints.ids())
        for commit in reversed(commits):
            if commit.checkpoint_id not in kept and commit is not commits[-1]:
                continue  # pruned long ago
            try:
                if not read:
                    self.checkpoints.verify(commit.checkpoint_id, commit.digest)
                state = self.checkpoints.read(commit.checkpoint_id, commit.digest) if read else None
            except CheckpointError as error:
                _log.warning("%s: going back to the commit before it", error)
                continue
            generation = self.ledger.restore(commit.checkpoint_id)
            self._prune()
            return state, commit, generation
        if commits:
            raise CheckpointError(
                f"none of the {len(commits)} commits of this run has a readable checkpoint: "
                "restore the checkpoints folder from a copy, or begin a new run"
            )
        return None

    def stop_reason(self, *, stop_requested: StopWish | None) -> StopReason | None:
        """Why the run is over at this commit, or None; begins the next epoch where it goes on into one."""
        if stop_requested:
            return stop_requested
        last = self.ledger.last_commit()
        if self.config.steps is not None and last is not None and last.total_steps >= self.config.steps:
            return "steps"
        if self.config.plan == "strided":
            return "epoch" if self._is_loader_at_the_end() and not self._goes_on else None
        if self.ledger.epoch_done():
            if not self._goes_on:
                return "epoch"
            self.ledger.advance_epoch(self.ledger.status().epoch)
        return None

    @property
    def _goes_on(self) -> bool:
        return self.config.iterate and not self.config.stop_after_epoch

    def _is_loader_at_the_end(self) -> bool:
        """Whether the last commit stands behind its epoch: the loader then stands at the beginning of the next."""
        last = self.ledger.loader_spans(last=1)
        return bool(last) and orjson.loads(last[0].state)["epoch"] > last[0].epoch

    def _prune(self) -> None:
        newest = self.ledger.commits(last=self.config.keep_checkpoints)
        self.checkpoints.remove_all_but({commit.checkpoint_id for commit in newest})

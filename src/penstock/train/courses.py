"""Where the global batches of a job come from, and how a commit tells which of them were learned.

strided   the loader's plan: every rank works its share out by itself; a commit holds the loader's state
claims    chunks: rank 0 leases one, every rank packs it and takes its share; a commit holds spans of chunks
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from penstock.errors import LedgerError
from penstock.feed import Batch, ChunkFeed, DistributedLoader, PackedWindow
from penstock.ledger import Commit, Exclusion, Lease, Ledger, LoaderProgress, LoaderSpan, Progress, Session
from penstock.ledger.exclusions import TO_THE_END
from penstock.train.committing import Committer
from penstock.train.config import TrainingConfig
from penstock.train.parts import LOADER_FIELDS
from penstock.train.ranks import Ranks
from penstock.train.replica import id_ranges
from penstock.train.trainer import State
from penstock.types import ChunkRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the data a step is, as its event tells it."""

    epoch: int
    about: dict[str, Any]


class Course(Protocol):
    """The batches of a job. All ranks call the same methods in the same order, but for those of rank 0 alone."""

    def shares(self) -> Generator[Batch, None, None]:
        """This rank's shares of the batches from here to where a commit is due."""
        ...

    def learned(self, share: Batch, samples: int) -> None:
        """The share that was handed out last is learned, and the others by the other ranks: so many samples in all."""
        ...

    def place(self) -> Place:
        """Of the share that was handed out last."""
        ...

    def next_step(self) -> int:
        """Rank 0 alone: the number of the step that comes."""
        ...

    def commit(self, committer: Committer, state: State) -> tuple[Commit, int] | None:
        """Rank 0 alone: bind what was learned to a state; the commit and its samples, or None where nothing was."""
        ...

    def committed(self, told: dict[str, Any]) -> None:
        """A commit was made; `told` is what `changes` of rank 0 said."""
        ...

    def changes(self) -> dict[str, Any]:
        """Rank 0 alone: what holds from here on, for all ranks."""
        ...


class StridedCourse:
    """Batches of the strided plan, by a `DistributedLoader`."""

    def __init__(
        self,
        loader: DistributedLoader,
        *,
        ledger: Ledger | None,
        session: Session | None,
        next_step: int,
        exclusions: int,
        start_of: Callable[[int], int],
    ) -> None:
        """Begin where the loader stands.

        Args:
            loader: At the last commit.
            ledger: Rank 0's.
            session: Rank 0's.
            next_step: The number of the next step.
            exclusions: Entries of the exclusion journal that the loader has taken up.
            start_of: The id of a block's first sample; behind the last block, how many samples there are.
        """
        self._loader = loader
        self._ledger = ledger
        self._session = session
        self._next_step = next_step
        self._exclusions = exclusions
        self._start_of = start_of
        self._epoch = loader.epoch
        self._done = self._handed = loader.position
        self._steps = self._samples = 0

    def shares(self) -> Generator[Batch, None, None]:
        self._epoch = self._loader.epoch
        batches = iter(self._loader)
        for made in batches:
            self._handed = self._loader.position
            yield batch_of(made)
        self._done = self._loader.position  # the beginning of the next epoch

    def learned(self, share: Batch, samples: int) -> None:
        self._done = self._handed
        self._steps += 1
        self._samples += samples

    def place(self) -> Place:
        about = {"block_id": None, "chunk_id": None, "start_offset": None, "samples": []}
        return Place(epoch=self._epoch, about={"batch": self._handed.step - 1, **about})

    def next_step(self) -> int:
        return self._next_step + self._steps

    def commit(self, committer: Committer, state: State) -> tuple[Commit, int] | None:
        assert self._session is not None
        if not self._steps:
            return None
        loader = LoaderProgress(
            epoch=self._epoch,
            steps=self._steps,
            samples=self._samples,
            exclusions=self._exclusions,
            state=orjson.dumps(self._loader.state_at(self._done)).decode(),
        )
        return committer.commit(state, [self._session.session_id], loader), self._samples

    def changes(self) -> dict[str, Any]:
        assert self._ledger is not None
        entries = self._ledger.exclusions()[self._exclusions :]
        return {"exclude": [self._ids_of(entry) for entry in entries]}

    def committed(self, told: dict[str, Any]) -> None:
        self._next_step += self._steps
        self._steps = self._samples = 0
        for first, stop in told["exclude"]:
            self._loader.exclude(np.arange(first, stop), at_once=True)
        self._exclusions += len(told["exclude"])

    def _ids_of(self, entry: Exclusion) -> tuple[int, int]:
        start, end = self._start_of(entry.block_id), self._start_of(entry.block_id + 1)
        return start + entry.start, end if entry.stop >= TO_THE_END else min(end, start + entry.stop)


class ClaimsCourse:
    """Batches of chunks that rank 0 leases: the job is one worker of the ledger."""

    def __init__(
        self,
        feed: ChunkFeed,
        ranks: Ranks,
        config: TrainingConfig,
        *,
        ledger: Ledger | None,
        session: Session | None,
        on_chunk: Callable[[Lease], None] = lambda _: None,
    ) -> None:
        """Begin with a claim.

        Args:
            feed: Packs chunks.
            ranks: Of the job.
            config: The run's.
            ledger: Rank 0's.
            session: Rank 0's.
            on_chunk: Called on rank 0 for every chunk that is learned to its end.
        """
        self._on_chunk = on_chunk
        self._feed = feed
        self._ranks = ranks
        self._config = config
        self._ledger = ledger
        self._session = session
        self._lease: Lease | None = None
        self._progress = Progress(samples=0, offset=0, steps=0)
        self._handed: tuple[PackedWindow, int, int] | None = None

    def shares(self) -> Generator[Batch, None, None]:
        while self._lease is not None or self._claim():
            lease = self._lease
            assert lease is not None
            window = self._feed.window(lease.ref, lease.excluded)
            size = self._config.batch_size
            for start in range(self._progress.offset, window.sequence_count, size):
                stop = min(start + size, window.sequence_count)
                self._handed = window, start, stop
                yield window.share(start, stop, self._ranks.rank, self._ranks.world)
            self._ranks.from_first(self._complete)
            self._lease = None

    def learned(self, share: Batch, samples: int) -> None:
        self._progress = Progress(samples=share.samples_done, offset=share.stop_offset, steps=self._progress.steps + 1)

    def place(self) -> Place:
        assert self._lease is not None
        assert self._handed is not None
        window, start, stop = self._handed
        block_id, chunk_id = self._lease.ref
        seen = id_ranges(window.samples_of(start, stop))
        about = {"batch": None, "block_id": block_id, "chunk_id": chunk_id, "start_offset": start, "samples": seen}
        return Place(epoch=self._lease.epoch, about=about)

    def next_step(self) -> int:
        ledger, session = self._first()
        step = ledger.take_step(session, None)
        assert step is not None
        return step

    def commit(self, committer: Committer, state: State) -> tuple[Commit, int] | None:
        ledger, session = self._first()
        if self._lease is not None and self._progress.steps:
            ledger.record(self._lease, self._progress)
        work = [done for done in ledger.pending() if done.session_id == session.session_id]
        if not any(done.steps for done in work):
            return None
        return committer.commit(state, [session.session_id]), sum(done.samples for done in work)

    def changes(self) -> dict[str, Any]:
        return {}

    def committed(self, told: dict[str, Any]) -> None:
        self._progress = self._progress._replace(steps=0)

    def _first(self) -> tuple[Ledger, Session]:
        assert self._ledger is not None
        assert self._session is not None
        return self._ledger, self._session

    def _claim(self) -> bool:
        told = self._ranks.from_first(self._claimed)
        if not told:
            return False
        told["ref"] = ChunkRef(*told["ref"])
        told["excluded"] = tuple((start, stop) for start, stop in told["excluded"])
        self._lease = Lease(**told)
        self._progress = Progress(samples=self._lease.start, offset=self._lease.start_offset, steps=0)
        return True

    def _claimed(self) -> dict[str, Any]:
        ledger, session = self._first()
        claimed = ledger.claim(session, round_chunks=self._config.commit_every_chunks)
        return {**claimed[0]._asdict(), "ref": [*claimed[0].ref]} if isinstance(claimed, list) else {}

    def _complete(self) -> dict[str, Any]:
        ledger, _ = self._first()
        assert self._lease is not None
        ledger.complete(self._lease, self._progress._replace(samples=self._lease.samples))
        self._on_chunk(self._lease)
        return {}


def loader_span_of(ledger: Ledger, commit: Commit) -> LoaderSpan | None:
    """Where the loader stood at the last commit; None at the very beginning."""
    found = ledger.loader_spans(last=1)
    if not found:
        if commit.total_steps:
            raise LedgerError(f"commit {commit.checkpoint_id} holds no loader state: expected one of a strided run")
        return None
    return found[0]


def batch_of(made: dict[str, Any]) -> Batch:
    """A loader's batch, as a trainer takes it."""
    arrays = {name: np.asarray(made[name], dtype=np.int64) for name in (*LOADER_FIELDS, "sample_ids")}
    return Batch(**arrays, start_offset=0, stop_offset=0, samples_done=0)

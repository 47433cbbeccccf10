"""The ledger contract, and the values that cross it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from penstock.ledger.exclusions import Exclusion, SkipRange
from penstock.ledger.state import Progress, Span
from penstock.types import BlockFacts, ChunkRef


class BlockCatalog(Protocol):
    """What a ledger asks the data set about; `BlockManager` is one."""

    def facts(self, block_id: int) -> BlockFacts | None:
        """Of one block, or None where there is no such block (yet)."""
        ...

    def get_total_blocks(self) -> int | None:
        """How many blocks there are; None while more may come."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A worker's stay in a run: the unit of liveness and of fencing."""

    session_id: int
    worker: str
    generation: int


class Lease(NamedTuple):
    """A chunk, held until the session's deadline and renewed by its heartbeat."""

    session_id: int
    token: int
    epoch: int
    ref: ChunkRef
    samples: int
    """Samples in the whole chunk."""
    start: int
    """Samples of it that are committed already; training goes on behind them."""
    start_offset: int
    """Packed sequences consumed already, to match `start`."""
    excluded: tuple[tuple[int, int], ...] = ()
    """Samples of the chunk, from and to, that are not to be learned; they count as done all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing can be claimed now. Ask again at `until` (the ledger's clock), `delay_s` from now, or after a commit."""

    until: float
    delay_s: float
    reason: Literal["round", "others", "blocks"]
    """The round is full; all that is left is with others or not yet committed; the source has not sent more blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """Every chunk of every block is committed in this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one session has trained and no commit holds."""

    session_id: int
    worker: str
    samples: int
    steps: int
    chunks: int
    """Chunks of which it has trained some part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint and the ledger's word on what it has learned."""

    seq: int
    checkpoint_id: str
    digest: str
    """Digest of the checkpoint's own manifest: the commit means these bytes and no others."""
    epoch: int
    total_steps: int
    next_step: int
    committed_at: float
    """When, in seconds since 1970; nothing is decided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """What a job has trained since the last commit, where a plan says which samples those are and not the ledger."""

    epoch: int
    steps: int
    samples: int
    exclusions: int
    """How many entries of the exclusion journal the loader has taken up."""
    state: str
    """The loader's state behind its last step, as JSON: from here the job goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpan(LoaderProgress):
    """The same, bound to a commit: from the state of the span before it to its own. The audit asks the plan which
    samples that is."""

    commit: int
    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One session as `penstock status` shows it."""

    session_id: int
    worker: str
    pid: int
    state: str
    """active, silent (past its deadline, not yet fenced), ended or fenced."""
    seconds_left: float
    """Until its deadline, which every sign of life puts off; of an active session alone, else 0."""
    chunks_committed: int
    """Chunks of which it has committed some part."""
    samples_committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """Where a run stands."""

    dataset_id: str
    block_size: int
    chunk_size: int
    generation: int
    epoch: int
    total_steps: int
    chunks: dict[str, int]
    """Chunks of the current epoch by phase; those nobody has asked for yet are not counted."""
    samples_committed: int
    """Of the current epoch."""
    blocks_seen: int
    exclusions: int
    """Entries of the exclusion journal."""
    last_commit: Commit | None
    workers: list[WorkerStatus]


class Ledger(Protocol):
    """Who trained what, once, through every crash.

    Atomicity: every call is one transaction; a killed caller leaves it done or not done.
    Exclusion: a chunk is leased to one session at a time, across threads, processes and (by backend) machines.
    Idempotence: `record`, `complete`, `leave` and `advance_epoch` may be repeated.
    Durability: `commit`, `restore` and `advance_epoch` survive power loss when they return; the others survive the
    death of any process, and after power loss the run restarts at its last commit anyway.
    Time: the ledger's own clock, never the caller's.
    Cost: every call but `restore`, `check_blocks`, `spans`, `commits` and `status` is O(chunks in hand), however many
    exist; `prioritise` and `exclude` go with what has ever been prioritised or excluded.
    Failures: `LeaseLost` to a session that was fenced (its uncommitted work is void); `LedgerMismatch` where the data
    is not the data the ledger belongs to; `LedgerError` otherwise.
    """

    def open(self) -> None:
        """Create or open, checking version and identity. Rolls nothing back."""
        ...

    def close(self) -> None:
        """Close this thread's connection; a closed ledger opens again on use."""
        ...

    def check_blocks(self) -> None:
        """Refuse with `LedgerMismatch` a data set whose blocks, as far as this run has used them, have changed."""
        ...

    def last_commit(self) -> Commit | None: ...

    def restore(self, checkpoint_id: str | None) -> int:
        """Go back to a commit (None: to the beginning), start a new generation and fence every older session.

        Returns:
            The new generation. Sessions of older ones get `LeaseLost` from now on.
        """
        ...

    def join(self, worker: str, *, generation: int, pid: int = 0) -> Session:
        """Enter the run; refused with `LeaseLost` where `generation` is not the current one."""
        ...

    def heartbeat(self, session: Session) -> float:
        """Live on; returns the new deadline on the ledger's clock."""
        ...

    def leave(self, session: Session) -> None:
        """End a session; what it has not committed comes back at once."""
        ...

    def fence_silent(self) -> list[int]:
        """Fence every session past its deadline, as `claim` does in passing; returns which."""
        ...

    def claim(
        self, session: Session, count: int = 1, *, round_chunks: int | None = None
    ) -> list[Lease] | Wait | EpochDone:
        """Lease the next chunks, first come first served: those of high priority, then in plan order.

        Args:
            session: Who asks.
            count: At most this many.
            round_chunks: Hand out nothing while this many chunks are leased or trained without being committed.
        """
        ...

    def record(self, lease: Lease, progress: Progress) -> None:
        """Note progress inside a leased chunk, so that a commit can hold part of it. Progress never goes back."""
        ...

    def complete(self, lease: Lease, progress: Progress) -> None:
        """The whole chunk is learned, though not yet committed."""
        ...

    def take_step(self, session: Session, limit: int | None) -> int | None:
        """Reserve one optimizer step of the run and get its number, or None where `limit` steps are spoken for."""
        ...

    def pending(self) -> list[Contribution]:
        """What the live sessions have trained since the last commit, by session id; not those that trained nothing."""
        ...

    def commit(
        self, checkpoint_id: str, digest: str, sessions: Iterable[int], *, loader: LoaderProgress | None = None
    ) -> Commit:
        """Bind all that these sessions have trained to a checkpoint, in one transaction.

        A job that follows a loader is one session and holds no chunks: `loader` says what it has trained.
        `LeaseLost` names a session that was fenced: average again without it. A checkpoint_id that exists is refused.
        """
        ...

    def advance_epoch(self, epoch: int) -> int:
        """Start the epoch after `epoch` if that is the current one and done; returns the current epoch either way."""
        ...

    def epoch_done(self) -> bool:
        """Whether every chunk of every block is committed in the current epoch."""
        ...

    def spans(self, epoch: int) -> Iterator[Span]:
        """What was committed in an epoch, by chunk and position."""
        ...

    def loader_spans(self, last: int | None = None) -> list[LoaderSpan]:
        """What was committed of a loader's batches, or the last few of them, oldest first; none in a run that claims
        chunks."""
        ...

    def prioritise(self, priorities: Mapping[ChunkRef, float]) -> None:
        """Hand out these chunks by priority from now on: above 0 before all others, highest first; below 0 after all
        others. Equal ones go in plan order. Holds in later epochs and after a restore. 0 takes a priority back; a chunk
        that was put forward already may stay so in this epoch.
        """
        ...

    def exclude(self, ranges: Iterable[SkipRange], reason: str) -> list[Exclusion]:
        """Exclude samples from every chunk that is begun from now on, in this epoch and later ones; kept by restores.

        A chunk of which a commit holds a part is finished as it was begun, and so is one in hand, unless it comes back.
        """
        ...

    def exclusions(self) -> list[Exclusion]:
        """The journal, oldest first."""
        ...

    def commits(self, last: int | None = None) -> list[Commit]:
        """All commits, or the last few of them, oldest first."""
        ...

    def status(self) -> LedgerStatus: ...

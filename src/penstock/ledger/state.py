"""The life of a chunk, as pure functions.

    open ── lease ──► leased ── complete ──► trained ── commit ──► committed
     │ ▲                │  └── record (part of it) ── commit ──► leased, part of it committed
     │ └── reopen ──────┴──────────────────────┘
     └── exclude ──► excluded

A chunk remembers two numbers of samples: `trained`, which only some replica's memory knows, and `committed`, which a
checkpoint holds. Reopening forgets the difference. Every store applies these functions, so they cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from penstock.errors import LeaseLost, LedgerError
from penstock.types import ChunkRef


class Phase(IntEnum):
    """Where a chunk is in its life."""

    OPEN = 0
    LEASED = 1
    TRAINED = 2
    COMMITTED = 3
    EXCLUDED = 4
    """Passed over: every sample of it was excluded before it was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk in one epoch."""

    epoch: int
    ref: ChunkRef
    samples: int
    phase: Phase = Phase.OPEN
    session: int = 0
    """Who holds it or trained it last."""
    token: int = 0
    """Fencing token of the last lease, of the next one while the chunk is open; grows with every lease of the run."""
    trained: int = 0
    """Samples learned by somebody, from the chunk's start."""
    offset: int = 0
    """Where the feed goes on inside the chunk (packed sequences), to match `trained`."""
    steps: int = 0
    """Optimizer steps spent since `committed`."""
    committed: int = 0
    """Samples of it that a committed checkpoint has learned."""
    committed_offset: int = 0
    exclusions: int = 0
    """How many entries of the exclusion journal held when it was begun. They shape its packing, so a begun chunk is
    finished as it was begun."""
    rank: float = 0.0
    """Lower ranks go first; 0 is the plan's own order."""

    @property
    def begun(self) -> bool:
        """Whether a commit holds part of it."""
        return self.committed > 0 or self.committed_offset > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Samples ``[start, stop)`` of a chunk, learned by one worker and bound to one commit. The audit reads these."""

    commit: int
    epoch: int
    ref: ChunkRef
    start: int
    stop: int
    start_offset: int
    stop_offset: int
    steps: int
    session: int
    exclusions: int = 0
    """How many entries of the exclusion journal held: samples of the span that they name were not learned."""


class Progress(NamedTuple):
    """How far a holder has come in its chunk."""

    samples: int
    """Samples learned, counted from the chunk's start."""
    offset: int
    """Packed sequences consumed, counted from the chunk's start."""
    steps: int
    """Optimizer steps spent on it since its lease or the last commit, whichever is later."""


def lease(chunk: Chunk, session: int, exclusions: int) -> Chunk:
    """Hand an open chunk to a session, under the token it carries; it goes on behind what is committed."""
    if chunk.phase is not Phase.OPEN:
        raise LedgerError(f"{name(chunk)} is {chunk.phase.name.lower()}: only an open chunk can be leased")
    held = chunk.exclusions if chunk.begun else exclusions
    return replace(chunk, phase=Phase.LEASED, session=session, exclusions=held)


def record(chunk: Chunk, session: int, token: int, progress: Progress) -> Chunk:
    """Note a holder's progress. Idempotent. Never goes back: what weights have learned they cannot unlearn."""
    if chunk.phase is Phase.OPEN or (chunk.session, chunk.token) != (session, token):
        raise LeaseLost(
            f"{name(chunk)} is no longer held under token {token}: discard what was learned since the commit"
        )
    if chunk.phase is not Phase.LEASED:
        raise LedgerError(f"{name(chunk)} is {chunk.phase.name.lower()}: it is complete, there is nothing to record")
    if not chunk.trained <= progress.samples <= chunk.samples:
        raise LedgerError(
            f"{name(chunk)}: progress of {progress.samples} samples is impossible: "
            f"expected {chunk.trained} to {chunk.samples}"
        )
    if progress.offset < chunk.offset or progress.steps < 0:
        raise LedgerError(
            f"{name(chunk)}: progress to offset {progress.offset} in {progress.steps} steps is impossible: "
            f"expected offset {chunk.offset} or more, and no negative steps"
        )
    return replace(chunk, trained=progress.samples, offset=progress.offset, steps=progress.steps)


def complete(chunk: Chunk, session: int, token: int, progress: Progress) -> Chunk:
    """A holder has learned the whole chunk. A second completion under the same token changes nothing."""
    done = chunk.phase in (Phase.TRAINED, Phase.COMMITTED)
    if done and (chunk.session, chunk.token) == (session, token):
        return chunk
    if progress.samples != chunk.samples:
        raise LedgerError(f"{name(chunk)}: completed with {progress.samples} samples, expected all {chunk.samples}")
    return replace(record(chunk, session, token, progress), phase=Phase.TRAINED)


def commit(chunk: Chunk, commit_seq: int) -> tuple[Chunk, Span | None]:
    """Bind what was trained to a commit. A chunk whose rest is untrained stays leased."""
    if chunk.phase not in (Phase.LEASED, Phase.TRAINED):
        return chunk, None
    moved = chunk.trained > chunk.committed or chunk.offset > chunk.committed_offset or chunk.phase is Phase.TRAINED
    if not moved:
        return chunk, None
    span = Span(
        commit=commit_seq,
        epoch=chunk.epoch,
        ref=chunk.ref,
        start=chunk.committed,
        stop=chunk.trained,
        start_offset=chunk.committed_offset,
        stop_offset=chunk.offset,
        steps=chunk.steps,
        session=chunk.session,
        exclusions=chunk.exclusions,
    )
    phase = Phase.COMMITTED if chunk.phase is Phase.TRAINED else chunk.phase
    return replace(chunk, phase=phase, committed=chunk.trained, committed_offset=chunk.offset, steps=0), span


def reopen(chunk: Chunk, token: int) -> Chunk:
    """Forget what no commit holds: the chunk is open again behind its committed part, under a new token."""
    if chunk.phase not in (Phase.LEASED, Phase.TRAINED):
        return chunk
    return replace(
        chunk, phase=Phase.OPEN, token=token, trained=chunk.committed, offset=chunk.committed_offset, steps=0
    )


def exclude(chunk: Chunk) -> Chunk:
    """Pass over a chunk none of whose samples is to be learned; one that is begun or in hand goes on."""
    return replace(chunk, phase=Phase.EXCLUDED) if chunk.phase is Phase.OPEN and not chunk.begun else chunk


def rewind(chunk: Chunk, span: Span, token: int) -> Chunk:
    """Undo a committed span, the latest of its chunk first; the chunk is open under a new token."""
    return replace(
        chunk,
        phase=Phase.OPEN,
        token=token,
        trained=span.start,
        committed=span.start,
        offset=span.start_offset,
        committed_offset=span.start_offset,
        steps=0,
    )


def name(chunk: Chunk) -> str:
    return f"chunk {chunk.ref.chunk_id} of block {chunk.ref.block_id} (epoch {chunk.epoch})"

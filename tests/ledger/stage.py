"""A stage for ledgers: a data set that is only numbers, a clock that tests set, and short ways to act on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.ledger import (
    EpochAudit,
    EpochDone,
    Lease,
    Ledger,
    Progress,
    Session,
    Wait,
    audit_epoch,
)
from penstock.types import BlockFacts, ChunkRef, DatasetIdentity

TESTS = Path(__file__).parents[1]
"""Belongs on the PYTHONPATH of processes that a ledger of this stage is pickled to."""

TIMEOUT_S = 60.0
BLOCKS = (5, 4)
CHUNK_SIZE = 2
CHUNKS = [ChunkRef(0, 0), ChunkRef(0, 1), ChunkRef(0, 2), ChunkRef(1, 0), ChunkRef(1, 1)]
"""All chunks of `BLOCKS`, in order; the third holds one sample, the others two."""
IDENTITY = DatasetIdentity(dataset_id="letters", block_size=5, chunk_size=CHUNK_SIZE)


@dataclass
class Clock:
    """The ledger's time, as the test wants it."""

    now: float = 1_000.0
    boot_id: str = "first boot"


@dataclass
class Catalog:
    """Blocks of a data set that exists as numbers only; the test may change it under the ledger."""

    sizes: list[int] = field(default_factory=lambda: list(BLOCKS))
    complete: bool = True
    altered: set[int] = field(default_factory=set)
    """Blocks that somebody has overwritten."""

    def facts(self, block_id: int) -> BlockFacts | None:
        if not 0 <= block_id < len(self.sizes):
            return None
        version = "altered" if block_id in self.altered else "sound"
        return BlockFacts(sample_count=self.sizes[block_id], checksum=f"{version} {block_id}")

    def get_total_blocks(self) -> int | None:
        return len(self.sizes) if self.complete else None


class Stage(Protocol):
    """What a ledger store gives its conformance suite: one empty store a test, and its clock."""

    clock: Clock
    catalog: Catalog

    def open(self, *, identity: DatasetIdentity | None = IDENTITY) -> Ledger:
        """Open the store's ledger, as another process would: nothing is shared with ledgers opened before."""
        ...


def join(ledger: Ledger, worker: str = "worker") -> Session:
    return ledger.join(worker, generation=ledger.status().generation)


def claim(ledger: Ledger, session: Session, count: int = 1) -> list[Lease]:
    """Claim where chunks are known to be there."""
    claimed = ledger.claim(session, count)
    assert isinstance(claimed, list), claimed
    return claimed


def refused(ledger: Ledger, session: Session, round_chunks: int | None = None) -> Wait | EpochDone:
    """Claim where nothing is known to be there."""
    claimed = ledger.claim(session, round_chunks=round_chunks)
    assert not isinstance(claimed, list), claimed
    return claimed


def whole(lease: Lease, steps: int = 1) -> Progress:
    """All of a chunk, learned; a packed sequence a sample."""
    return Progress(samples=lease.samples, offset=lease.samples, steps=steps)


def learn(ledger: Ledger, session: Session, count: int = 1) -> list[Lease]:
    """Claim chunks and complete them, with a step for each."""
    leases = claim(ledger, session, count)
    for lease in leases:
        ledger.take_step(session, None)
        ledger.complete(lease, whole(lease))
    return leases


def learn_all(ledger: Ledger, session: Session) -> None:
    """Learn whatever is left of the epoch."""
    while isinstance(claimed := ledger.claim(session), list):
        for lease in claimed:
            ledger.complete(lease, whole(lease))


def audit(ledger: Ledger, epoch: int = 0, blocks: tuple[int, ...] = BLOCKS) -> EpochAudit:
    return audit_epoch(epoch, ledger.spans(epoch), list(blocks), CHUNK_SIZE, ledger.exclusions())


def seen(ledger: Ledger) -> tuple[object, ...]:
    """Everything a ledger tells: equal means that nothing a caller could notice has changed."""
    status = ledger.status()
    spans = [list(ledger.spans(epoch)) for epoch in range(status.epoch + 2)]
    return status, ledger.pending(), ledger.commits(), ledger.exclusions(), spans

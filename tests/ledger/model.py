"""A ledger as one would describe it in a minute: no tables, no transactions, and copies of everything at each commit.

Its witness is `weights`: how often the committed weights have learned each sample. It is kept as training would keep
it, by adding up what each contributor has learned since it took up the common state, and knows nothing of spans.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

from ledger.stage import CHUNK_SIZE, TIMEOUT_S, Catalog, Clock
from penstock.ledger import EpochDone, Lease, Session
from penstock.types import ChunkRef

SEQUENCES = 10
"""Packed sequences a sample: progress is told in these, so that it may lie within a sample."""

Key = tuple[int, ChunkRef]
"""A chunk in an epoch."""
Sample = tuple[int, int, int]
"""A sample in an epoch: epoch, block, place in the block."""


@dataclass
class Held:
    """A lease and how far its holder has come."""

    lease: Lease
    offset: int
    skipped: frozenset[int] = frozenset()
    """Places in the block that were excluded when the chunk was begun."""
    steps: int = 0
    complete: bool = False


@dataclass
class Worker:
    """A session, and what its replica has learned since it last took up the common state."""

    session: Session
    deadline: float
    boot_id: str
    lost: bool = False
    held: dict[ChunkRef, Held] = field(default_factory=dict)
    learned: Counter[Sample] = field(default_factory=Counter)
    passed: int = 0
    """Samples learned or excluded since then."""
    steps: int = 0


@dataclass
class Committed:
    """What a checkpoint holds."""

    epoch: int = 0
    total_steps: int = 0
    next_step: int = 1
    weights: Counter[Sample] = field(default_factory=Counter)
    offsets: dict[Key, int] = field(default_factory=dict)
    skipped: dict[Key, frozenset[int]] = field(default_factory=dict)
    """Of chunks that are begun."""
    passed: Counter[int] = field(default_factory=Counter)
    """Samples learned or excluded, by epoch."""
    closed: set[Key] = field(default_factory=set)


@dataclass
class Model:
    """What the ledger should be."""

    catalog: Catalog
    clock: Clock
    generation: int = 0
    next_step: int = 1
    now: Committed = field(default_factory=Committed)
    commits: dict[str, Committed] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    priorities: dict[ChunkRef, float] = field(default_factory=dict)
    excluded: list[list[int]] = field(default_factory=list)
    """Entries of the journal: epoch, step, block, start, stop."""

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.lost]

    @property
    def in_hand(self) -> set[ChunkRef]:
        return {ref for worker in self.living for ref in worker.held}

    def samples(self, ref: ChunkRef) -> int:
        return min(CHUNK_SIZE, self.catalog.sizes[ref.block_id] - ref.chunk_id * CHUNK_SIZE)

    def claimable(self) -> list[ChunkRef]:
        """Everything that is with nobody and not committed whole, in order."""
        every = [
            ChunkRef(block_id, chunk_id)
            for block_id, size in enumerate(self.catalog.sizes)
            for chunk_id in range(-(-size // CHUNK_SIZE))
        ]
        left = [
            ref
            for ref in every
            if ref not in self.in_hand and (self.now.epoch, ref) not in self.now.closed and not self.is_passed_over(ref)
        ]
        return sorted(left, key=lambda ref: (-self.priorities.get(ref, 0.0), ref))

    def places(self, ref: ChunkRef) -> range:
        first = ref.chunk_id * CHUNK_SIZE
        return range(first, first + self.samples(ref))

    def skipped(self, ref: ChunkRef) -> frozenset[int]:
        """Places of a chunk that are excluded where it is begun now."""
        return frozenset(
            place
            for place in self.places(ref)
            if any(block == ref.block_id and start <= place < stop for _, _, block, start, stop in self.excluded)
        )

    def is_passed_over(self, ref: ChunkRef) -> bool:
        begun = self.now.offsets.get((self.now.epoch, ref), 0) > 0
        return not begun and self.skipped(ref) == frozenset(self.places(ref))

    def exclude(self, block_id: int, start: int, stop: int) -> None:
        self.excluded.append([self.now.epoch, self.next_step, block_id, start, stop])

    def is_excluded(self, epoch: int, block_id: int, place: int) -> bool:
        return any(
            since <= epoch and block == block_id and start <= place < stop
            for since, _, block, start, stop in self.excluded
        )

    def answer(self, count: int, round_chunks: int | None) -> list[ChunkRef] | str | EpochDone:
        """What a claim must answer: chunks, the reason for a wait, or that the epoch is done."""
        if round_chunks is not None:
            count = min(count, round_chunks - len(self.in_hand))
        if count < 1:
            return "round"
        if self.claimable():
            return self.claimable()[:count]
        if self.in_hand:
            return "others"
        return EpochDone(epoch=self.now.epoch) if self.catalog.complete else "blocks"

    def is_epoch_done(self) -> bool:
        return not self.in_hand and not self.claimable() and self.catalog.complete

    def join(self, session: Session) -> None:
        self.workers.append(Worker(session, self.clock.now + TIMEOUT_S, self.clock.boot_id))

    def lease(self, worker: Worker, lease: Lease) -> None:
        offset = self.now.offsets.get((lease.epoch, lease.ref), 0)
        assert (lease.epoch, lease.session_id) == (self.now.epoch, worker.session.session_id)
        assert (lease.samples, lease.start, lease.start_offset) == (
            self.samples(lease.ref),
            offset // SEQUENCES,
            offset,
        )
        key = (lease.epoch, lease.ref)
        skipped = self.now.skipped[key] if offset else self.skipped(lease.ref)
        first = lease.ref.chunk_id * CHUNK_SIZE
        assert skipped == {first + place for low, high in lease.excluded for place in range(low, high)}
        worker.held[lease.ref] = Held(lease, offset, skipped)

    def learn(self, worker: Worker, held: Held, offset: int) -> None:
        """One step of a worker, from where it is in a chunk to another place in it."""
        lease = held.lease
        first = lease.ref.chunk_id * CHUNK_SIZE
        for place in range(held.offset // SEQUENCES, offset // SEQUENCES):
            worker.passed += 1
            if first + place not in held.skipped:
                worker.learned[lease.epoch, lease.ref.block_id, first + place] += 1
        held.offset = offset
        held.steps += 1
        worker.steps += 1
        self.next_step += 1

    def lose(self, worker: Worker) -> None:
        worker.lost = True
        worker.learned.clear()
        worker.passed = 0

    def fence_silent(self, but: Worker | None = None) -> list[int]:
        silent = [
            worker
            for worker in self.living
            if worker is not but and (worker.deadline <= self.clock.now or worker.boot_id != self.clock.boot_id)
        ]
        for worker in silent:
            self.lose(worker)
        return [worker.session.session_id for worker in silent]

    def commit(self, checkpoint_id: str, contributors: list[Worker]) -> None:
        for worker in contributors:
            self.now.weights += worker.learned
            worker.learned.clear()
            worker.passed = 0
            self.now.total_steps += worker.steps
            worker.steps = 0
            for ref, held in list(worker.held.items()):
                held.steps = 0
                key = (held.lease.epoch, ref)
                before = self.now.offsets.get(key, 0)
                self.now.passed[held.lease.epoch] += held.offset // SEQUENCES - before // SEQUENCES
                self.now.offsets[key] = held.offset
                self.now.skipped[key] = held.skipped
                if held.complete:
                    self.now.closed.add((held.lease.epoch, ref))
                    del worker.held[ref]
        self.now.next_step = self.next_step
        self.commits[checkpoint_id] = deepcopy(self.now)

    def restore(self, checkpoint_id: str | None) -> None:
        for worker in self.living:
            self.lose(worker)
        self.now = deepcopy(self.commits[checkpoint_id]) if checkpoint_id else Committed()
        names = list(self.commits)
        for name in names[names.index(checkpoint_id) + 1 if checkpoint_id else 0 :]:
            del self.commits[name]
        self.next_step = self.now.next_step
        self.generation += 1
        for entry in self.excluded:
            entry[:2] = min(entry[:2], [self.now.epoch, self.next_step])

"""Which chunks can be handed out: those that came back, then the plan's next ones, from blocks that must not change.

Chunks are put on record some at a time, ahead of being claimed (the stock), so that a claim finds an open row and takes
it in one statement. The stock never reaches into a block that no claim has reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from penstock.errors import LedgerError, LedgerMismatch
from penstock.ledger import rows
from penstock.ledger.base import BlockCatalog
from penstock.ledger.database import Transaction
from penstock.ledger.exclusions import Exclusions
from penstock.ledger.state import Chunk
from penstock.plans import ClaimsPlan
from penstock.types import BlockFacts, ChunkRef

_STOCK = 256


@dataclass(frozen=True, slots=True)
class Supply:
    """A plan over the blocks of a data set, as far as a ledger has registered them. Works inside a transaction."""

    plan: ClaimsPlan
    catalog: BlockCatalog

    def next_chunks(self, tx: Transaction, epoch: int, count: int, exclusions: Exclusions) -> list[Chunk]:
        """Chunks that are open: those that came back, in order, then those nobody has had.

        What has a priority below 0 waits until the plan has nothing left.
        """
        found = self._open(tx, epoch, count)
        while len(found) < count and self._stock(tx, epoch, exclusions):
            found = self._open(tx, epoch, count)
        if len(found) < count:  # what a search from the first open one has passed over, and what is to be last
            found = rows.open_chunks(tx, epoch, count, "< 0")
            found += rows.open_chunks(tx, epoch, count - len(found), "= 0")
        if len(found) < count:
            self._put(tx, self._stock_of_priorities(tx, epoch, exclusions))
            found += rows.open_chunks(tx, epoch, count - len(found), "> 0")
        plain = [chunk.ref for chunk in found if chunk.rank == 0]
        if plain:
            rows.set_first_open(tx, epoch, plain[0], only_lower=False)
        for block_id in {chunk.ref.block_id for chunk in found}:
            self.check_block(block_id, rows.block(tx, block_id))
        return found

    def is_exhausted(self, tx: Transaction, epoch: int, exclusions: Exclusions) -> bool:
        """Whether every chunk of every block is done with in an epoch, and no more blocks will come."""
        if self.catalog.get_total_blocks() is None or rows.has_unfinished(tx, epoch):
            return False
        if self._has_ranked(tx, epoch, exclusions):
            return False
        return not any(ids for _, _, ids in self._planned(tx, epoch, exclusions, self._known_samples))

    def check_blocks(self, tx: Transaction) -> None:
        """Refuse a data set whose blocks, as far as this run has used them, have changed."""
        for block_id, samples, checksum in tx.execute(
            "SELECT block_id, sample_count, checksum FROM blocks ORDER BY block_id"
        ).fetchall():
            self.check_block(block_id, (samples, checksum))

    def check_block(self, block_id: int, known: tuple[int, str] | None) -> None:
        """Refuse a block that is not what it was when it was first used."""
        facts = self.catalog.facts(block_id)
        if known is not None and (facts is None or known != facts):
            got = f"{facts.sample_count} samples, {facts.checksum}" if facts else "no such block"
            raise LedgerMismatch(
                f"block {block_id} has changed since this run first used it: got {got}, "
                f"expected {known[0]} samples, {known[1]}: restore the block, or begin a new run"
            )

    def require_chunk(self, ref: ChunkRef) -> None:
        """Refuse a chunk that the data set does not have."""
        facts = self.catalog.facts(ref.block_id)
        if facts is None or not 0 <= ref.chunk_id < self.plan.chunk_count(facts.sample_count):
            there = f"{self.plan.chunk_count(facts.sample_count)} chunks" if facts else "no such block yet"
            raise LedgerError(
                f"there is no chunk {ref.chunk_id} of block {ref.block_id} ({there}): "
                "expected one of the data set; nothing was changed"
            )

    def put_changed(self, tx: Transaction, epoch: int, changed: Iterable[ChunkRef], exclusions: Exclusions) -> None:
        """Put on record what must be, now that priorities have changed: no chunk that comes back may go before it."""
        tx.execute(
            "UPDATE epochs SET ranked_rank = NULL, ranked_block = NULL, ranked_chunk = NULL WHERE epoch = ?", (epoch,)
        )
        while self._put(tx, self._stock_of_priorities(tx, epoch, exclusions, first=True)):
            pass
        cursor = rows.epoch_cursor(tx, epoch)
        for ref in sorted(changed):  # without a priority again, and the plan has passed it already
            if cursor is None or ref > cursor or rows.rank(tx, ref) or rows.chunk(tx, epoch, ref) is not None:
                continue
            chunk = self._chunk(epoch, ref, self._registered_samples(tx, ref.block_id) or 0)
            if not exclusions.covers(ref, chunk.samples, self.plan.chunk_size):
                self._put(tx, [chunk])
                rows.set_first_open(tx, epoch, ref, only_lower=True)

    @staticmethod
    def _open(tx: Transaction, epoch: int, count: int) -> list[Chunk]:
        found = rows.open_chunks(tx, epoch, count, "< 0")
        return found + rows.first_open_chunks(tx, epoch, count - len(found))

    def _stock(self, tx: Transaction, epoch: int, exclusions: Exclusions) -> bool:
        """Put the next chunks on record; False where there are none."""
        ranked = self._stock_of_priorities(tx, epoch, exclusions, first=True)
        if ranked:
            return self._put(tx, ranked)
        for block_id, samples, ids in self._planned(tx, epoch, exclusions, self._registered_samples):
            last = ids[-1] if ids else -1
            if len(ids) and len(ids) == last - ids[0] + 1:
                size = self.plan.chunk_samples(last, samples)
                rows.add_run_of_chunks(tx, epoch, block_id, range(ids[0], last + 1), self.plan.chunk_size, size)
            elif ids:
                self._put(tx, [self._chunk(epoch, ChunkRef(block_id, chunk_id), samples) for chunk_id in ids])
            if ids:
                rows.set_first_open(tx, epoch, ChunkRef(block_id, ids[0]), only_lower=True)
                return True
        return False

    def restock(self, tx: Transaction, epoch: int, exclusions: Exclusions) -> None:
        """Put more chunks of the block that claims are in on record before the last one is gone."""
        cursor, found = rows.epoch_cursor(tx, epoch), rows.first_open_chunks(tx, epoch, 1)
        if cursor is None or not found or found[0].ref.block_id != cursor.block_id:
            return
        samples = rows.block(tx, cursor.block_id)
        if samples is None or cursor.chunk_id + 1 >= self.plan.chunk_count(samples[0]):
            return
        self._stock(tx, epoch, exclusions)
        rows.set_first_open(tx, epoch, found[0].ref, only_lower=False)

    @staticmethod
    def _put(tx: Transaction, stock: list[Chunk]) -> bool:
        if stock:
            rows.add_chunks(tx, stock)
        return bool(stock)

    def _chunk(self, epoch: int, ref: ChunkRef, block_samples: int) -> Chunk:
        return Chunk(epoch=epoch, ref=ref, samples=self.plan.chunk_samples(ref.chunk_id, block_samples))

    def _planned(
        self,
        tx: Transaction,
        epoch: int,
        exclusions: Exclusions,
        block_samples: Callable[[Transaction, int], int | None],
    ) -> Iterator[tuple[int, int, list[int]]]:
        """What the plan has behind the cursor, some at a time: a block, its samples, and chunks of it.

        Left out is what is excluded, on record, or goes by a priority. Where it may write, the cursor goes along.
        """
        cursor = rows.epoch_cursor(tx, epoch)
        sizes: dict[int, int | None] = {}

        def size(block_id: int) -> int | None:
            if block_id not in sizes:
                sizes[block_id] = block_samples(tx, block_id)
            return sizes[block_id]

        while (planned := self.plan.after(cursor, size)) is not None:
            block_id, first = planned.ref.block_id, planned.ref.chunk_id
            samples = sizes[block_id] or 0
            stop = min(first + _STOCK, self.plan.chunk_count(samples))
            taken = rows.taken_places(tx, epoch, planned.ref, _STOCK)
            cursor = ChunkRef(block_id, stop - 1)
            if block_samples == self._registered_samples:
                rows.set_epoch_cursor(tx, epoch, cursor)
            ids = [chunk_id for chunk_id in range(first, stop) if chunk_id not in taken]
            if len(exclusions):
                chunks = [self._chunk(epoch, ChunkRef(block_id, chunk_id), samples) for chunk_id in ids]
                chunk_size = self.plan.chunk_size
                ids = [c.ref.chunk_id for c in chunks if not exclusions.covers(c.ref, c.samples, chunk_size)]
            yield block_id, samples, ids

    def _stock_of_priorities(
        self, tx: Transaction, epoch: int, exclusions: Exclusions, *, first: bool = False
    ) -> list[Chunk]:
        """The next chunks that go by a priority: those before the plan's order, or all that are left."""
        stock: list[Chunk] = []
        place = None
        for place in self._ranked(tx, epoch, first=first):
            samples = self._registered_samples(tx, place.ref.block_id)
            size = self.plan.chunk_samples(place.ref.chunk_id, samples or 0)
            if not exclusions.covers(place.ref, size, self.plan.chunk_size):
                stock.append(replace(place, samples=size))
            if len(stock) == _STOCK:
                break
        if place is not None:
            tx.execute(
                "UPDATE epochs SET ranked_rank = ?, ranked_block = ?, ranked_chunk = ? WHERE epoch = ?",
                (place.rank, place.ref.block_id, place.ref.chunk_id, epoch),
            )
        return stock

    def _has_ranked(self, tx: Transaction, epoch: int, exclusions: Exclusions) -> bool:
        for place in self._ranked(tx, epoch):
            size = self.plan.chunk_samples(place.ref.chunk_id, self._known_samples(tx, place.ref.block_id) or 0)
            if not exclusions.covers(place.ref, size, self.plan.chunk_size):
                return True
        return False

    @staticmethod
    def _ranked(tx: Transaction, epoch: int, *, first: bool = False) -> Iterator[Chunk]:
        """Chunks that go by a priority and are not on record in an epoch, without their sizes."""
        at = tx.execute(
            "SELECT ranked_rank, ranked_block, ranked_chunk FROM epochs WHERE epoch = ?", (epoch,)
        ).fetchone()
        while True:
            behind = "" if at[0] is None else "AND (p.rank, p.block_id, p.chunk_id) > (?, ?, ?) "
            found = tx.execute(
                f"SELECT p.rank, p.block_id, p.chunk_id FROM priorities p "
                f"WHERE p.rank {'<' if first else '<>'} 0 {behind}"
                "AND NOT EXISTS (SELECT 1 FROM chunks c WHERE c.epoch = ? AND c.block_id = p.block_id "
                "AND c.chunk_id = p.chunk_id) AND NOT EXISTS (SELECT 1 FROM done_chunks c WHERE c.epoch = ? "
                "AND c.block_id = p.block_id AND c.chunk_id = p.chunk_id) "
                "ORDER BY p.rank, p.block_id, p.chunk_id LIMIT ?",
                (*(() if at[0] is None else at), epoch, epoch, _STOCK),
            ).fetchall()
            for rank, block_id, chunk_id in found:
                yield Chunk(epoch=epoch, ref=ChunkRef(block_id, chunk_id), samples=0, rank=rank)
            if len(found) < _STOCK:
                return
            at = found[-1]

    def _registered_samples(self, tx: Transaction, block_id: int) -> int | None:
        """Sample count of a block, which is registered when it is first needed and must not change afterwards."""
        known = rows.block(tx, block_id)
        if known is not None:
            self.check_block(block_id, known)
            return known[0]
        facts = self.catalog.facts(block_id)
        if facts is None:
            return None
        tx.execute("INSERT INTO blocks VALUES (?, ?, ?)", (block_id, facts.sample_count, facts.checksum))
        return facts.sample_count

    def _known_samples(self, tx: Transaction, block_id: int) -> int | None:
        facts: BlockFacts | None = self.catalog.facts(block_id)
        if facts is not None:
            return facts.sample_count
        known = rows.block(tx, block_id)
        return known[0] if known else None

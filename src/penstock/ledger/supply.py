"""Which chunks can be handed out: those that came back, then the plan's next ones, from blocks that must not change."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import LedgerMismatch
from penstock.ledger import rows
from penstock.ledger.base import BlockCatalog
from penstock.ledger.state import Chunk
from penstock.plans import ClaimsPlan


@dataclass(frozen=True, slots=True)
class Supply:
    """A plan over the blocks of a data set, as far as a ledger has registered them. Works inside a transaction."""

    plan: ClaimsPlan
    catalog: BlockCatalog

    def next_chunks(self, tx: sqlite3.Connection, epoch: int, count: int) -> Iterator[Chunk]:
        """Chunks that came back, in order, then those nobody has had."""
        returned = rows.open_chunks(tx, epoch, count)
        for chunk in returned:
            self._check_block(tx, chunk.ref.block_id)
        yield from returned
        cursor = rows.epoch_cursor(tx, epoch)
        for _ in range(count - len(returned)):
            planned = self.plan.after(cursor, lambda block_id: self._registered_samples(tx, block_id))
            if planned is None:
                return
            cursor = planned.ref
            rows.set_epoch_cursor(tx, epoch, cursor)
            yield Chunk(epoch=epoch, ref=planned.ref, samples=planned.sample_count)

    def is_exhausted(self, tx: sqlite3.Connection, epoch: int) -> bool:
        """Whether every chunk of every block is committed in an epoch, and no more blocks will come."""
        if self.catalog.get_total_blocks() is None or rows.has_unfinished(tx, epoch):
            return False
        cursor = rows.epoch_cursor(tx, epoch)
        return self.plan.after(cursor, lambda block_id: self._known_samples(tx, block_id)) is None

    def check_blocks(self, tx: sqlite3.Connection) -> None:
        """Refuse a data set whose blocks, as far as this run has used them, have changed."""
        for (block_id,) in tx.execute("SELECT block_id FROM blocks ORDER BY block_id").fetchall():
            self._check_block(tx, block_id)

    def _registered_samples(self, tx: sqlite3.Connection, block_id: int) -> int | None:
        """Sample count of a block, which is registered when it is first needed and must not change afterwards."""
        known = rows.block_samples(tx, block_id)
        if known is not None:
            self._check_block(tx, block_id)
            return known
        facts = self.catalog.facts(block_id)
        if facts is None:
            return None
        tx.execute("INSERT INTO blocks VALUES (?, ?, ?)", (block_id, facts.sample_count, facts.checksum))
        return facts.sample_count

    def _known_samples(self, tx: sqlite3.Connection, block_id: int) -> int | None:
        facts = self.catalog.facts(block_id)
        return facts.sample_count if facts else rows.block_samples(tx, block_id)

    def _check_block(self, tx: sqlite3.Connection, block_id: int) -> None:
        facts = self.catalog.facts(block_id)
        known = tx.execute("SELECT sample_count, checksum FROM blocks WHERE block_id = ?", (block_id,)).fetchone()
        if facts is None or known != (facts.sample_count, facts.checksum):
            got = f"{facts.sample_count} samples, {facts.checksum}" if facts else "no such block"
            raise LedgerMismatch(
                f"block {block_id} has changed since this run first used it: got {got}, "
                f"expected {known[0]} samples, {known[1]}: restore the block, or begin a new run"
            )

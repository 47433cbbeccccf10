"""Handing chunks out and taking them back: claims, progress, completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

from penstock.errors import LeaseLost, LedgerError
from penstock.ledger import rows, state
from penstock.ledger.base import EpochDone, Lease, Session, Wait
from penstock.ledger.database import Database, Move, Transaction
from penstock.ledger.exclusions import Exclusions
from penstock.ledger.state import Chunk, Phase, Progress
from penstock.ledger.supply import Supply
from penstock.types import ChunkRef

_BLOCKS_POLL_S = 1.0


class Handing:
    """The chunks of one ledger. What is frequent takes one statement where that can be; else `state.py` decides."""

    def __init__(self, database: Database, supply: Supply | None) -> None:
        self._db = database
        self._given_supply = supply
        self._journal = Exclusions()
        self._last_block: tuple[int, tuple[int, str]] | None = None

    @property
    def supply(self) -> Supply:
        if self._given_supply is None:
            raise LedgerError("this ledger was opened to read: open it with an identity and a catalog to claim")
        return self._given_supply

    # -- claims --------------------------------------------------------------------------------------------------------

    def claim(self, session: Session, count: int, round_chunks: int | None) -> list[Lease] | Wait | EpochDone:
        if count < 1:
            raise LedgerError(f"count={count} claims nothing: expected 1 or more")
        supply, request = self.supply, self._db.new_request()
        if self._last_block is not None:
            supply.check_block(*self._last_block)
        leases: list[Lease] = []
        if round_chunks is None:  # the limit of a round is counted, and so takes the long way
            leases = self._claim_open(session.session_id, count, request)
            if len(leases) == count:
                return leases
        request = self._db.new_request() if leases else request
        missing = count - len(leases)
        more = self._db.change("claim", lambda tx: self._claim(tx, session, missing, round_chunks, request))
        if not leases:
            return more
        return leases + more if isinstance(more, list) else leases

    def _claim_open(self, session_id: int, count: int, request: int) -> list[Lease]:
        """Take what is open in one go."""
        leases = self._leases(session_id, self._db.claim_open(session_id, count, request))
        for lease in leases:
            if self._last_block is None or self._last_block[0] != lease.ref.block_id:
                self._enter_block(lease.ref.block_id, leases)
            if self._db.restock_every and lease.token % self._db.restock_every == 0:
                self._db.change("stock", lambda tx: self.supply.restock(tx, rows.run(tx).epoch, self.journal(tx)))
        return leases

    def _leases(self, session_id: int, found: list[tuple[int, ...]]) -> list[Lease]:
        if len(found) > 1:
            found.sort()
        return [
            Lease(
                session_id=session_id,
                token=token,
                epoch=epoch,
                ref=(ref := ChunkRef(block_id, chunk_id)),
                samples=samples,
                start=start,
                start_offset=offset,
                excluded=self._excluded(ref, samples, exclusions) if exclusions else (),
            )
            for epoch, block_id, chunk_id, samples, token, start, offset, exclusions, _ in found
        ]

    def _enter_block(self, block_id: int, leases: list[Lease]) -> None:
        """Take note of the block that chunks come from; one that has changed is refused, and the chunks go back."""
        known = self._db.read(lambda tx: rows.block(tx, block_id))
        assert known is not None, f"block {block_id} was never registered"
        try:
            self.supply.check_block(block_id, known)
        except LedgerError:
            self._db.change("claim", lambda tx: self._give_back(tx, leases))
            raise
        self._last_block = block_id, known

    def _give_back(self, tx: Transaction, leases: Iterable[Lease]) -> None:
        held = [rows.chunk(tx, lease.epoch, lease.ref) for lease in leases]
        mine = {lease.token for lease in leases}
        self.reopen(tx, [chunk for chunk in held if chunk is not None and chunk.token in mine])

    def _claim(
        self, tx: Transaction, session: Session, count: int, round_chunks: int | None, request: int
    ) -> list[Lease] | Wait | EpochDone:
        require_active(tx, session.session_id)
        if request and (had := rows.chunks_of_request(tx, session.session_id, request)):
            return [self._lease(tx, chunk) for chunk in had]  # carried out, though the connection was lost
        if round_chunks is None and (found := tx.claim_open(session.session_id, count, request)):
            self.journal(tx)
            return self._leases(session.session_id, found)
        self.fence_silent(tx, but=session.session_id)
        run = rows.run(tx)
        if round_chunks is not None:
            count = min(count, round_chunks - rows.count_in_hand(tx))
            if count < 1:
                return _wait(tx, "round")
        leases = []
        for chunk in self.supply.next_chunks(tx, run.epoch, count, self.journal(tx)):
            held = state.lease(chunk, session.session_id, run.exclusions)
            rows.save_chunk(tx, held, request)
            leases.append(self._lease(tx, held))
        if leases:
            block_id = leases[-1].ref.block_id
            known = rows.block(tx, block_id)
            self._last_block = (block_id, known) if known else None
        return leases or self._nothing(tx, run.epoch)

    def _nothing(self, tx: Transaction, epoch: int) -> Wait | EpochDone:
        """Why there is nothing to hand out."""
        if rows.count_in_hand(tx):
            return _wait(tx, "others")
        return EpochDone(epoch=epoch) if self.is_exhausted(tx, epoch) else _wait(tx, "blocks")

    def is_exhausted(self, tx: Transaction, epoch: int) -> bool:
        return self.supply.is_exhausted(tx, epoch, self.journal(tx))

    # -- what becomes of them ------------------------------------------------------------------------------------------

    def move(self, lease: Lease, name: Move, progress: Progress) -> None:
        """Note progress inside a chunk, or its end."""
        ref, samples, offset = lease.ref, progress.samples, progress.offset
        if progress.steps >= 0 and self._db.move_chunk(
            name,
            (
                *(samples, offset, progress.steps, lease.epoch, ref.block_id, ref.chunk_id),
                *(lease.session_id, lease.token, samples, offset, samples),
            ),
        ):
            return
        transition = state.complete if name == "complete" else state.record
        self._db.change(name, lambda tx: self._move(tx, lease, transition, progress))

    def _move(
        self,
        tx: Transaction,
        lease: Lease,
        transition: Callable[[Chunk, int, int, Progress], Chunk],
        progress: Progress,
    ) -> None:
        chunk = rows.chunk(tx, lease.epoch, lease.ref)
        if chunk is None:
            raise LeaseLost(f"{lease.ref} of epoch {lease.epoch} is gone: the run was restored to an earlier commit")
        require_active(tx, lease.session_id)
        rows.save_chunk(tx, transition(chunk, lease.session_id, lease.token, progress))

    def end_session(self, tx: Transaction, session_id: int, ended_as: str) -> None:
        """End a session first, so that it claims nothing more, then reopen what it holds."""
        tx.execute("UPDATE sessions SET state = ? WHERE session_id = ? AND state = 'active'", (ended_as, session_id))
        self.reopen(tx, rows.unfinished_chunks(tx, session_id))

    def fence_silent(self, tx: Transaction, but: int = 0) -> list[int]:
        silent = tx.execute(
            "SELECT session_id FROM sessions WHERE state = 'active' AND session_id != ? "
            f"AND (deadline <= ? OR boot_id != ?){tx.locking}",
            (but, tx.now(), tx.boot_id()),
        ).fetchall()
        found = sorted(session_id for (session_id,) in silent)
        for session_id in found:
            self.end_session(tx, session_id, "fenced")
        return found

    def reopen(self, tx: Transaction, chunks: list[Chunk]) -> None:
        """Open chunks again, but for those of which nothing is left to learn."""
        if not chunks:
            return
        token, journal = rows.take_tokens(tx, len(chunks)), self.journal(tx)
        for place, chunk in enumerate(chunks):
            self.save_open(tx, state.reopen(chunk, token + place), journal)

    def save_open(self, tx: Transaction, chunk: Chunk, journal: Exclusions) -> None:
        """Save a chunk that may be open; wholly excluded, it is passed over."""
        if len(journal) and journal.covers(chunk.ref, chunk.samples, self._chunk_size(tx)):
            chunk = state.exclude(chunk)
        chunk = replace(chunk, rank=rows.rank(tx, chunk.ref))
        rows.save_chunk(tx, chunk)
        if chunk.phase is Phase.OPEN:
            rows.set_first_open(tx, chunk.epoch, chunk.ref, only_lower=True)

    # -- exclusions ----------------------------------------------------------------------------------------------------

    def journal(self, tx: Transaction) -> Exclusions:
        """The exclusion journal, read again where it has grown."""
        if len(self._journal) < rows.run(tx).exclusions:
            self._journal = Exclusions(rows.exclusions(tx))
        return self._journal

    def _lease(self, tx: Transaction, chunk: Chunk) -> Lease:
        excluded = []
        if chunk.exclusions:
            excluded = self.journal(tx).of_chunk(chunk.ref, chunk.samples, self._chunk_size(tx), chunk.exclusions)
        return rows.lease(chunk, excluded)

    def _excluded(self, ref: ChunkRef, samples: int, upto: int) -> tuple[tuple[int, int], ...]:
        if len(self._journal) < upto:
            self._db.read(self.journal)
        return tuple(self._journal.of_chunk(ref, samples, self.supply.plan.chunk_size, upto))

    def _chunk_size(self, tx: Transaction) -> int:
        if self._given_supply is not None:
            return self._given_supply.plan.chunk_size
        return tx.execute("SELECT chunk_size FROM run").fetchone()[0]


def _wait(tx: Transaction, reason: str) -> Wait:
    now = tx.now()
    until = now + _BLOCKS_POLL_S
    if reason == "others":
        soonest = tx.execute("SELECT min(deadline) FROM sessions WHERE state = 'active'").fetchone()[0]
        until = max(now, min(until, soonest)) if soonest is not None else until
    assert reason in ("round", "others", "blocks")
    return Wait(until=until, delay_s=until - now, reason=reason)


def require_active(tx: Transaction, session_id: int) -> None:
    found = tx.execute("SELECT worker, state FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if found is None or found[1] != "active":
        lost(found[0] if found else f"session {session_id}")


def lost(worker: str) -> NoReturn:
    raise LeaseLost(
        f"{worker} was fenced: it was silent for too long or the run was resumed elsewhere; "
        "its chunks went back, so what it learned since the last commit must be discarded"
    )

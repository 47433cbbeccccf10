"""The ledger contract in SQL: rows in, pure transitions, rows out, one transaction a call."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from penstock.errors import LeaseLost, LedgerError, LedgerMismatch, differences
from penstock.ledger import rows, state
from penstock.ledger.base import (
    Commit,
    Contribution,
    EpochDone,
    Lease,
    LedgerStatus,
    Session,
    Wait,
)
from penstock.ledger.report import read_status
from penstock.ledger.sqlite import SqliteDatabase
from penstock.ledger.state import Chunk, Progress, Span
from penstock.ledger.supply import Supply
from penstock.types import DatasetIdentity

_BLOCKS_POLL_S = 1.0


class SqlLedger:
    """See `Ledger` for what it promises. May be shared by threads and pickled to spawned processes."""

    def __init__(
        self,
        database: SqliteDatabase,
        *,
        identity: DatasetIdentity | None,
        supply: Supply | None,
        session_timeout_s: float,
    ) -> None:
        self._db = database
        self._identity = identity
        self._given_supply = supply
        self._session_timeout_s = session_timeout_s

    def open(self) -> None:
        try:
            self._open()
        except LedgerError:
            self._db.close()
            raise

    def _open(self) -> None:
        if not self._db.exists():
            if self._identity is None:
                raise LedgerError(f"{self._db.url}: there is no ledger: expected the ledger of a run that has begun")
            identity = self._identity
            self._db.create((identity.dataset_id, identity.block_size, identity.chunk_size))
        if self._identity is None:
            return
        with self._db.reading() as tx:
            found = tx.execute("SELECT dataset_id, block_size, chunk_size FROM run").fetchone()
        dataset_id, block_size, chunk_size = found
        expected = DatasetIdentity(dataset_id=dataset_id, block_size=block_size, chunk_size=chunk_size)
        different = differences(self._identity.as_dict(), expected.as_dict())
        if different:
            raise LedgerMismatch(
                f"{self._db.url} belongs to other data: {'; '.join(different)}: "
                "name another run for this data, or go back to the data and chunk size it began with"
            )

    def close(self) -> None:
        self._db.close()

    # -- the run -------------------------------------------------------------------------------------------------------

    def last_commit(self) -> Commit | None:
        with self._db.reading() as tx:
            return rows.last_commit(tx)

    def commits(self, last: int | None = None) -> list[Commit]:
        with self._db.reading() as tx:
            return rows.commits(tx, last)

    def restore(self, checkpoint_id: str | None) -> int:
        with self._db.transaction("restore", durable=True) as tx:
            target = None
            if checkpoint_id is not None:
                target = rows.commit_of(tx, checkpoint_id)
                if target is None:
                    raise LedgerError(
                        f"{self._db.url} has no commit of checkpoint {checkpoint_id}: nothing was changed"
                    )
            self._roll_back(tx, target)
            tx.execute("UPDATE sessions SET state = 'fenced' WHERE state = 'active'")
            tx.execute("UPDATE run SET generation = generation + 1")
            return rows.run(tx).generation

    def _roll_back(self, tx: sqlite3.Connection, target: Commit | None) -> None:
        for chunk in rows.unfinished_chunks(tx):
            rows.save_chunk(tx, state.reopen(chunk))
        seq = target.seq if target else 0
        for span in rows.spans_after(tx, seq):  # the latest first
            chunk = rows.chunk(tx, span.epoch, span.ref)
            assert chunk is not None, f"a span without a chunk: {span}"
            rows.save_chunk(tx, state.rewind(chunk, span))
            rows.add_committed_samples(tx, span.epoch, span.start - span.stop)
        tx.execute("DELETE FROM spans WHERE commit_seq > ?", (seq,))
        tx.execute("DELETE FROM commits WHERE seq > ?", (seq,))
        epoch, steps, next_step = (target.epoch, target.total_steps, target.next_step) if target else (0, 0, 1)
        tx.execute("DELETE FROM chunks WHERE epoch > ?", (epoch,))
        tx.execute("DELETE FROM epochs WHERE epoch > ?", (epoch,))
        tx.execute("UPDATE run SET epoch = ?, total_steps = ?, next_step = ?", (epoch, steps, next_step))

    def advance_epoch(self, epoch: int) -> int:
        with self._db.transaction("advance_epoch", durable=True) as tx:
            run = rows.run(tx)
            if run.epoch == epoch and self._supply.is_exhausted(tx, run.epoch):
                tx.execute("UPDATE run SET epoch = epoch + 1")
                tx.execute("INSERT INTO epochs VALUES (?, NULL, NULL, 0)", (epoch + 1,))
                return epoch + 1
            return run.epoch

    def check_blocks(self) -> None:
        with self._db.reading() as tx:
            self._supply.check_blocks(tx)

    def epoch_done(self) -> bool:
        with self._db.reading() as tx:
            return self._supply.is_exhausted(tx, rows.run(tx).epoch)

    # -- workers -------------------------------------------------------------------------------------------------------

    def join(self, worker: str, *, generation: int, pid: int = 0) -> Session:
        with self._db.transaction("join") as tx:
            current = rows.run(tx).generation
            if generation != current:
                raise LeaseLost(
                    f"{worker} belongs to generation {generation} of this run, which is in generation {current}: "
                    "the run was resumed elsewhere; end this worker"
                )
            session_id = tx.execute(
                "INSERT INTO sessions (worker, generation, pid, state, boot_id, deadline, steps) "
                "VALUES (?, ?, ?, 'active', ?, ?, 0)",
                (worker, generation, pid, self._db.boot_id(), self._deadline()),
            ).lastrowid
            assert session_id is not None
            return Session(session_id=session_id, worker=worker, generation=generation)

    def heartbeat(self, session: Session) -> float:
        with self._db.transaction("heartbeat") as tx:
            deadline = self._deadline()  # read under the lock: waiting for it must not shorten a life
            changed = tx.execute(
                "UPDATE sessions SET deadline = ?, boot_id = ? WHERE session_id = ? AND state = 'active'",
                (deadline, self._db.boot_id(), session.session_id),
            ).rowcount
            if not changed:
                _lost(session.worker)
            return deadline

    def leave(self, session: Session) -> None:
        with self._db.transaction("leave") as tx:
            self._end_session(tx, session.session_id, "ended")

    def _end_session(self, tx: sqlite3.Connection, session_id: int, ended_as: str) -> None:
        for chunk in rows.unfinished_chunks(tx, session_id):
            rows.save_chunk(tx, state.reopen(chunk))
        tx.execute("UPDATE sessions SET state = ? WHERE session_id = ? AND state = 'active'", (ended_as, session_id))

    def fence_silent(self) -> list[int]:
        with self._db.transaction("fence_silent") as tx:
            return self._fence_the_silent(tx, but=0)

    def _fence_the_silent(self, tx: sqlite3.Connection, but: int) -> list[int]:
        silent = tx.execute(
            "SELECT session_id FROM sessions "
            "WHERE state = 'active' AND session_id != ? AND (deadline <= ? OR boot_id != ?)",
            (but, self._db.now(), self._db.boot_id()),
        ).fetchall()
        for (session_id,) in silent:
            self._end_session(tx, session_id, "fenced")
        return [session_id for (session_id,) in silent]

    def _deadline(self) -> float:
        return self._db.now() + self._session_timeout_s

    # -- chunks --------------------------------------------------------------------------------------------------------

    def claim(
        self, session: Session, count: int = 1, *, round_chunks: int | None = None
    ) -> list[Lease] | Wait | EpochDone:
        if count < 1:
            raise LedgerError(f"count={count} claims nothing: expected 1 or more")
        with self._db.transaction("claim") as tx:
            _require_active(tx, session.session_id)
            self._fence_the_silent(tx, but=session.session_id)
            run = rows.run(tx)
            if round_chunks is not None:
                count = min(count, round_chunks - rows.count_in_hand(tx))
                if count < 1:
                    return self._wait(tx, "round")
            token = run.next_token
            leases = []
            for chunk in self._supply.next_chunks(tx, run.epoch, count):
                held = state.lease(chunk, session.session_id, token)
                token += 1
                rows.save_chunk(tx, held)
                leases.append(_lease_of(held))
            if leases:
                tx.execute("UPDATE run SET next_token = ?", (token,))
                return leases
            if rows.count_in_hand(tx):
                return self._wait(tx, "others")
            if self._supply.is_exhausted(tx, run.epoch):
                return EpochDone(epoch=run.epoch)
            return self._wait(tx, "blocks")

    def _wait(self, tx: sqlite3.Connection, reason: str) -> Wait:
        now = self._db.now()
        until = now + _BLOCKS_POLL_S
        if reason == "others":
            soonest = tx.execute("SELECT min(deadline) FROM sessions WHERE state = 'active'").fetchone()[0]
            until = max(now, min(until, soonest)) if soonest is not None else until
        assert reason in ("round", "others", "blocks")
        return Wait(until=until, delay_s=until - now, reason=reason)

    def record(self, lease: Lease, progress: Progress) -> None:
        self._move(lease, "record", lambda chunk: state.record(chunk, lease.session_id, lease.token, progress))

    def complete(self, lease: Lease, progress: Progress) -> None:
        self._move(lease, "complete", lambda chunk: state.complete(chunk, lease.session_id, lease.token, progress))

    def _move(self, lease: Lease, operation: str, transition: Callable[[Chunk], Chunk]) -> None:
        with self._db.transaction(operation) as tx:
            chunk = rows.chunk(tx, lease.epoch, lease.ref)
            if chunk is None:
                raise LeaseLost(
                    f"{lease.ref} of epoch {lease.epoch} is gone: the run was restored to an earlier commit"
                )
            _require_active(tx, lease.session_id)
            rows.save_chunk(tx, transition(chunk))

    # -- steps and commits ---------------------------------------------------------------------------------------------

    def take_step(self, session: Session, limit: int | None) -> int | None:
        with self._db.transaction("take_step") as tx:
            _require_active(tx, session.session_id)
            run = rows.run(tx)
            if limit is not None:
                taken = tx.execute("SELECT coalesce(sum(steps), 0) FROM sessions WHERE state = 'active'").fetchone()[0]
                if run.total_steps + taken >= limit:
                    return None
            tx.execute("UPDATE sessions SET steps = steps + 1 WHERE session_id = ?", (session.session_id,))
            tx.execute("UPDATE run SET next_step = next_step + 1")
            return run.next_step

    def pending(self) -> list[Contribution]:
        with self._db.reading() as tx:
            return rows.pending(tx)

    def commit(self, checkpoint_id: str, digest: str, sessions: Iterable[int]) -> Commit:
        with self._db.transaction("commit", durable=True) as tx:
            if rows.commit_of(tx, checkpoint_id) is not None:
                raise LedgerError(f"checkpoint {checkpoint_id} is committed already: expected a new id")
            run = rows.run(tx)
            last = rows.last_commit(tx)
            seq = last.seq + 1 if last else 1
            total_steps = run.total_steps
            for session_id in sorted(set(sessions)):
                _require_active(tx, session_id)
                steps = 0
                for chunk in rows.unfinished_chunks(tx, session_id):
                    moved, span = state.commit(chunk, seq)
                    if span is not None:
                        rows.save_chunk(tx, moved)
                        rows.add_span(tx, span)
                        rows.add_committed_samples(tx, span.epoch, span.stop - span.start)
                        steps += span.steps
                # A step taken and not yet recorded stays reserved, or the limit could be passed.
                tx.execute("UPDATE sessions SET steps = max(0, steps - ?) WHERE session_id = ?", (steps, session_id))
                total_steps += steps
            commit = Commit(
                seq=seq,
                checkpoint_id=checkpoint_id,
                digest=digest,
                epoch=run.epoch,
                total_steps=total_steps,
                next_step=run.next_step,
            )
            rows.add_commit(tx, commit)
            tx.execute("UPDATE run SET total_steps = ?", (total_steps,))
            return commit

    # -- reading -------------------------------------------------------------------------------------------------------

    def spans(self, epoch: int) -> Iterator[Span]:
        with self._db.reading() as tx:
            found = rows.spans(tx, epoch)
        yield from found

    def status(self) -> LedgerStatus:
        with self._db.reading() as tx:
            return read_status(tx, self._db.now(), self._db.boot_id())

    @property
    def _supply(self) -> Supply:
        if self._given_supply is None:
            raise LedgerError("this ledger was opened to read: open it with an identity and a catalog to claim")
        return self._given_supply


def _lease_of(chunk: Chunk) -> Lease:
    return Lease(
        session_id=chunk.session,
        token=chunk.token,
        epoch=chunk.epoch,
        ref=chunk.ref,
        samples=chunk.samples,
        start=chunk.committed,
        start_offset=chunk.committed_offset,
    )


def _require_active(tx: sqlite3.Connection, session_id: int) -> None:
    found = tx.execute("SELECT worker, state FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if found is None or found[1] != "active":
        _lost(found[0] if found else f"session {session_id}")


def _lost(worker: str) -> NoReturn:
    raise LeaseLost(
        f"{worker} was fenced: it was silent for too long or the run was resumed elsewhere; "
        "its chunks went back, so what it learned since the last commit must be discarded"
    )

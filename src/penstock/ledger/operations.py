"""The ledger contract in SQL: rows in, pure transitions, rows out, one transaction a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from penstock.errors import LeaseLost, LedgerError, LedgerMismatch, differences
from penstock.ledger import rows, state
from penstock.ledger.base import (
    Commit,
    Contribution,
    EpochDone,
    Lease,
    LedgerStatus,
    LoaderProgress,
    LoaderSpan,
    Session,
    Wait,
)
from penstock.ledger.database import Database, Transaction
from penstock.ledger.exclusions import Exclusion, SkipRange
from penstock.ledger.handing import Handing, lost, require_active
from penstock.ledger.report import read_status
from penstock.ledger.state import Progress, Span
from penstock.ledger.supply import Supply
from penstock.types import ChunkRef, DatasetIdentity


class SqlLedger:
    """See `Ledger` for what it promises. May be shared by threads and pickled to spawned processes."""

    def __init__(
        self,
        database: Database,
        *,
        identity: DatasetIdentity | None,
        supply: Supply | None,
        session_timeout_s: float,
    ) -> None:
        self._db = database
        self._identity = identity
        self._handing = Handing(database, supply)
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
        dataset_id, block_size, chunk_size = self._db.read(
            lambda tx: tx.execute("SELECT dataset_id, block_size, chunk_size FROM run").fetchone()
        )
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
        return self._db.read(rows.last_commit)

    def commits(self, last: int | None = None) -> list[Commit]:
        return self._db.read(lambda tx: rows.commits(tx, last))

    def restore(self, checkpoint_id: str | None) -> int:
        return self._db.change("restore", lambda tx: self._restore(tx, checkpoint_id), durable=True)

    def _restore(self, tx: Transaction, checkpoint_id: str | None) -> int:
        target = None
        if checkpoint_id is not None:
            target = rows.commit_of(tx, checkpoint_id)
            if target is None:
                raise LedgerError(f"{self._db.url} has no commit of checkpoint {checkpoint_id}: nothing was changed")
        # Sessions first: from here on nobody claims or completes anything.
        tx.execute("UPDATE sessions SET state = 'fenced' WHERE state = 'active'")
        self._roll_back(tx, target)
        tx.execute("UPDATE run SET generation = generation + 1")
        return rows.run(tx).generation

    def _roll_back(self, tx: Transaction, target: Commit | None) -> None:
        self._handing.reopen(tx, rows.unfinished_chunks(tx))
        seq = target.seq if target else 0
        journal = self._handing.journal(tx)
        undone = rows.spans_after(tx, seq)
        token = rows.take_tokens(tx, len(undone))
        for place, span in enumerate(undone):  # the latest first
            chunk = rows.chunk(tx, span.epoch, span.ref)
            assert chunk is not None, f"a span without a chunk: {span}"
            self._handing.save_open(tx, state.rewind(chunk, span, token + place), journal)
            rows.add_committed_samples(tx, span.epoch, span.start - span.stop)
        for span in rows.loader_spans_after(tx, seq):
            rows.add_committed_samples(tx, span.epoch, -span.samples)
        tx.execute("DELETE FROM loader_spans WHERE commit_seq > ?", (seq,))
        tx.execute("DELETE FROM spans WHERE commit_seq > ?", (seq,))
        tx.execute("DELETE FROM commits WHERE seq > ?", (seq,))
        epoch, steps, next_step = (target.epoch, target.total_steps, target.next_step) if target else (0, 0, 1)
        for table in ("chunks", "done_chunks", "epochs"):
            tx.execute(f"DELETE FROM {table} WHERE epoch > ?", (epoch,))
        tx.execute("UPDATE run SET epoch = ?, total_steps = ?, next_step = ?", (epoch, steps, next_step))
        # What was excluded stays excluded; it now holds from the point that the run is put back to.
        tx.execute(
            "UPDATE exclusions SET epoch = ?, step = ? WHERE epoch > ? OR (epoch = ? AND step > ?)",
            (epoch, next_step, epoch, epoch, next_step),
        )

    def advance_epoch(self, epoch: int) -> int:
        def advance(tx: Transaction) -> int:
            current = rows.run(tx).epoch
            if current == epoch and self._handing.is_exhausted(tx, current):
                tx.execute("UPDATE run SET epoch = epoch + 1")
                rows.add_epoch(tx, epoch + 1)
                return epoch + 1
            return current

        return self._db.change("advance_epoch", advance, durable=True)

    def check_blocks(self) -> None:
        self._db.read(self._handing.supply.check_blocks)

    def epoch_done(self) -> bool:
        return self._db.read(lambda tx: self._handing.is_exhausted(tx, rows.run(tx).epoch))

    # -- workers -------------------------------------------------------------------------------------------------------

    def join(self, worker: str, *, generation: int, pid: int = 0) -> Session:
        request = self._db.new_request()

        def join(tx: Transaction) -> int:
            current = rows.run(tx).generation
            if generation != current:
                raise LeaseLost(
                    f"{worker} belongs to generation {generation} of this run, which is in generation {current}: "
                    "the run was resumed elsewhere; end this worker"
                )
            if tx.again:
                had = tx.execute("SELECT session_id FROM sessions WHERE request = ?", (request,)).fetchone()
                if had is not None:
                    return had[0]
            return tx.execute(
                "INSERT INTO sessions "
                "(worker, generation, pid, state, boot_id, deadline, steps, request, step_request, step) "
                "VALUES (?, ?, ?, 'active', ?, ?, 0, ?, 0, 0) RETURNING session_id",
                (worker, generation, pid, tx.boot_id(), tx.now() + self._session_timeout_s, request),
            ).fetchone()[0]

        session_id = self._db.change("join", join)
        return Session(session_id=session_id, worker=worker, generation=generation)

    def heartbeat(self, session: Session) -> float:
        deadline = self._db.renew(session.session_id, self._session_timeout_s)
        return lost(session.worker) if deadline is None else deadline

    def leave(self, session: Session) -> None:
        self._db.change("leave", lambda tx: self._handing.end_session(tx, session.session_id, "ended"))

    def fence_silent(self) -> list[int]:
        return self._db.change("fence_silent", self._handing.fence_silent)

    # -- chunks --------------------------------------------------------------------------------------------------------

    def claim(
        self, session: Session, count: int = 1, *, round_chunks: int | None = None
    ) -> list[Lease] | Wait | EpochDone:
        return self._handing.claim(session, count, round_chunks)

    def record(self, lease: Lease, progress: Progress) -> None:
        self._handing.move(lease, "record", progress)

    def complete(self, lease: Lease, progress: Progress) -> None:
        self._handing.move(lease, "complete", progress)

    def prioritise(self, priorities: Mapping[ChunkRef, float]) -> None:
        for ref, priority in priorities.items():
            self._handing.supply.require_chunk(ref)
            if not abs(priority) < float("inf"):
                raise LedgerError(f"priority {priority} of {ref} cannot be compared: expected a number")

        def prioritise(tx: Transaction) -> None:
            epoch, journal = rows.run(tx).epoch, self._handing.journal(tx)
            for ref, priority in priorities.items():
                tx.execute(
                    "INSERT INTO priorities VALUES (?, ?, ?) "
                    "ON CONFLICT (block_id, chunk_id) DO UPDATE SET rank = excluded.rank",
                    (ref.block_id, ref.chunk_id, -float(priority)),
                )
            for chunk in rows.all_open_chunks(tx, epoch):
                self._handing.save_open(tx, chunk, journal)
            self._handing.supply.put_changed(tx, epoch, priorities, journal)

        self._db.change("prioritise", prioritise, durable=True)

    def exclude(self, ranges: Iterable[SkipRange], reason: str) -> list[Exclusion]:
        wanted, request = list(ranges), self._db.new_request()
        for skip in wanted:
            if skip.block_id < 0 or not 0 <= skip.start < skip.stop:
                raise LedgerError(
                    f"{skip} names no samples: expected 0 <= start < stop in a block; nothing was changed"
                )

        def exclude(tx: Transaction) -> list[Exclusion]:
            if tx.again and tx.execute("SELECT 1 FROM exclusions WHERE request = ?", (request,)).fetchone():
                return rows.exclusions(tx)[-len(wanted) :]
            run, now = rows.run(tx), tx.wall_time()
            entries = [
                Exclusion(
                    seq=seq,
                    epoch=run.epoch,
                    step=run.next_step,
                    block_id=skip.block_id,
                    start=skip.start,
                    stop=skip.stop,
                    reason=reason,
                    excluded_at=now,
                )
                for seq, skip in enumerate(wanted, run.exclusions + 1)
            ]
            for entry in entries:
                rows.add_exclusion(tx, entry, request)
            tx.execute("UPDATE run SET exclusions = exclusions + ?", (len(entries),))
            journal = self._handing.journal(tx)
            for chunk in rows.all_open_chunks(tx, run.epoch):
                self._handing.save_open(tx, chunk, journal)
            return entries

        return self._db.change("exclude", exclude, durable=True)

    def exclusions(self) -> list[Exclusion]:
        return self._db.read(rows.exclusions)

    # -- steps and commits ---------------------------------------------------------------------------------------------

    def take_step(self, session: Session, limit: int | None) -> int | None:
        request = self._db.new_request()

        def take_step(tx: Transaction) -> int | None:
            require_active(tx, session.session_id)
            if tx.again:
                had = tx.execute(
                    "SELECT step FROM sessions WHERE session_id = ? AND step_request = ?",
                    (session.session_id, request),
                ).fetchone()
                if had is not None:
                    return had[0]
            run = rows.run(tx)
            if limit is not None:
                taken = tx.execute(
                    "SELECT CAST(coalesce(sum(steps), 0) AS BIGINT) FROM sessions WHERE state = 'active'"
                ).fetchone()[0]
                if run.total_steps + taken >= limit:
                    return None
            tx.execute(
                "UPDATE sessions SET steps = steps + 1, step_request = ?, step = ? WHERE session_id = ?",
                (request, run.next_step, session.session_id),
            )
            tx.execute("UPDATE run SET next_step = next_step + 1")
            return run.next_step

        return self._db.change("take_step", take_step)

    def pending(self) -> list[Contribution]:
        return self._db.read(rows.pending)

    def commit(
        self, checkpoint_id: str, digest: str, sessions: Iterable[int], *, loader: LoaderProgress | None = None
    ) -> Commit:
        contributors = sorted(set(sessions))
        if loader is not None and len(contributors) != 1:
            raise LedgerError(
                f"a loader's progress belongs to one session: got {len(contributors)}; nothing was changed"
            )

        def commit(tx: Transaction) -> Commit:
            return self._commit(tx, checkpoint_id, digest, contributors, loader)

        return self._db.change("commit", commit, durable=True)

    def _commit(
        self,
        tx: Transaction,
        checkpoint_id: str,
        digest: str,
        contributors: list[int],
        loader: LoaderProgress | None,
    ) -> Commit:
        had = rows.commit_of(tx, checkpoint_id)
        if had is not None and tx.again and had.digest == digest:
            return had
        if had is not None:
            raise LedgerError(f"checkpoint {checkpoint_id} is committed already: expected a new id")
        run, last = rows.run(tx), rows.last_commit(tx)
        seq = last.seq + 1 if last else 1
        total_steps = run.total_steps
        for session_id in contributors:
            require_active(tx, session_id)
            bound = [state.commit(chunk, seq) for chunk in rows.unfinished_chunks(tx, session_id)]
            rows.save_committed(tx, [(moved, span) for moved, span in bound if span is not None])
            steps = sum(span.steps for _, span in bound if span is not None)
            # A step taken and not yet recorded stays reserved, or the limit could be passed.
            tx.execute(
                "UPDATE sessions SET steps = CASE WHEN steps > ? THEN steps - ? ELSE 0 END WHERE session_id = ?",
                (steps, steps, session_id),
            )
            total_steps += steps
        epoch, next_step = run.epoch, run.next_step
        if loader is not None:
            epoch, total_steps, next_step = loader.epoch, total_steps + loader.steps, next_step + loader.steps
            self._bind_loader(tx, LoaderSpan(commit=seq, session=contributors[0], **asdict(loader)), run.epoch)
        commit = Commit(
            seq=seq,
            checkpoint_id=checkpoint_id,
            digest=digest,
            epoch=epoch,
            total_steps=total_steps,
            next_step=next_step,
            committed_at=tx.wall_time(),
        )
        rows.add_commit(tx, commit)
        tx.execute("UPDATE run SET epoch = ?, total_steps = ?, next_step = ?", (epoch, total_steps, next_step))
        return commit

    @staticmethod
    def _bind_loader(tx: Transaction, span: LoaderSpan, current_epoch: int) -> None:
        if not current_epoch <= span.epoch <= current_epoch + 1:
            raise LedgerError(
                f"the loader is in epoch {span.epoch}, the run in {current_epoch}: expected this one or the next; "
                "nothing was changed"
            )
        if span.epoch > current_epoch:
            rows.add_epoch(tx, span.epoch)
        rows.add_loader_span(tx, span)
        rows.add_committed_samples(tx, span.epoch, span.samples)

    # -- reading -------------------------------------------------------------------------------------------------------

    def spans(self, epoch: int) -> Iterator[Span]:
        yield from self._db.read(lambda tx: rows.spans(tx, epoch))

    def loader_spans(self, last: int | None = None) -> list[LoaderSpan]:
        return self._db.read(lambda tx: rows.loader_spans(tx, last))

    def status(self) -> LedgerStatus:
        return self._db.read(read_status)

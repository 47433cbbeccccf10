"""Where a run stands, read from the ledger alone."""

from __future__ import annotations

from penstock.ledger import rows
from penstock.ledger.base import LedgerStatus, WorkerStatus
from penstock.ledger.database import Transaction
from penstock.ledger.state import Phase


def read_status(tx: Transaction) -> LedgerStatus:
    """A summary; counts the chunks of the current epoch. A session past its deadline shows as silent."""
    dataset_id, block_size, chunk_size = tx.execute("SELECT dataset_id, block_size, chunk_size FROM run").fetchone()
    run = rows.run(tx)
    counted = dict(
        tx.execute(  # an open chunk without a session is stock that nobody has asked for
            "SELECT phase, count(*) FROM (SELECT phase, session FROM chunks WHERE epoch = ? UNION ALL "
            "SELECT phase, session FROM done_chunks WHERE epoch = ?) AS every "
            "WHERE phase > 0 OR session > 0 GROUP BY phase",
            (run.epoch, run.epoch),
        ).fetchall()
    )
    samples = tx.execute("SELECT samples_committed FROM epochs WHERE epoch = ?", (run.epoch,)).fetchone()[0]
    return LedgerStatus(
        dataset_id=dataset_id,
        block_size=block_size,
        chunk_size=chunk_size,
        generation=run.generation,
        epoch=run.epoch,
        total_steps=run.total_steps,
        chunks={phase.name.lower(): counted.get(int(phase), 0) for phase in Phase},
        samples_committed=samples,
        blocks_seen=tx.execute("SELECT count(*) FROM blocks").fetchone()[0],
        exclusions=run.exclusions,
        last_commit=rows.last_commit(tx),
        workers=_workers(tx),
    )


def _workers(tx: Transaction) -> list[WorkerStatus]:
    now = tx.now()
    found = tx.execute(
        "SELECT session_id, worker, pid, "
        "CASE WHEN state = 'active' AND (deadline <= ? OR boot_id != ?) THEN 'silent' ELSE state END, "
        "CASE WHEN state = 'active' AND boot_id = ? THEN deadline - ? ELSE 0 END, "
        "coalesce(chunks, 0), CAST(coalesce(samples, 0) AS BIGINT) "
        "FROM sessions LEFT JOIN (SELECT session, count(*) AS chunks, sum(samples) AS samples FROM "
        "(SELECT session, sum(stop - start) AS samples FROM spans GROUP BY session, epoch, block_id, chunk_id) AS part "
        "GROUP BY session) AS done ON session = session_id ORDER BY session_id",
        (now, tx.boot_id(), tx.boot_id(), now),
    )
    return [
        WorkerStatus(
            session_id=session_id,
            worker=worker,
            pid=pid,
            state=state,
            seconds_left=max(0.0, float(seconds_left)),
            chunks_committed=chunks,
            samples_committed=samples,
        )
        for session_id, worker, pid, state, seconds_left, chunks, samples in found.fetchall()
    ]

"""Rows of the ledger's tables, to and from values."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, dataclass

from penstock.ledger.base import Commit, Contribution
from penstock.ledger.state import Chunk, Phase, Span
from penstock.types import ChunkRef

_CHUNK = (
    "epoch, block_id, chunk_id, samples, phase, session, token, trained, offset_in, steps, committed, committed_offset"
)
_SPAN = "commit_seq, epoch, block_id, chunk_id, start, stop, start_offset, stop_offset, steps, session"
_UNFINISHED = "phase < 3"
"""The condition of the index `chunks_unfinished`, word for word: without it SQLite reads every chunk there ever was."""
_IN_HAND = f"phase IN (1, 2) AND {_UNFINISHED}"
_COMMIT = "seq, checkpoint_id, digest, epoch, total_steps, next_step"


@dataclass(frozen=True, slots=True)
class Run:
    generation: int
    epoch: int
    total_steps: int
    next_step: int
    next_token: int


def run(tx: sqlite3.Connection) -> Run:
    return Run(*tx.execute("SELECT generation, epoch, total_steps, next_step, next_token FROM run").fetchone())


def chunk(tx: sqlite3.Connection, epoch: int, ref: ChunkRef) -> Chunk | None:
    found = tx.execute(
        f"SELECT {_CHUNK} FROM chunks WHERE epoch = ? AND block_id = ? AND chunk_id = ?",
        (epoch, ref.block_id, ref.chunk_id),
    ).fetchone()
    return _chunk(found) if found else None


def save_chunk(tx: sqlite3.Connection, chunk: Chunk) -> None:
    tx.execute(
        f"INSERT OR REPLACE INTO chunks ({_CHUNK}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            chunk.epoch,
            chunk.ref.block_id,
            chunk.ref.chunk_id,
            chunk.samples,
            int(chunk.phase),
            chunk.session,
            chunk.token,
            chunk.trained,
            chunk.offset,
            chunk.steps,
            chunk.committed,
            chunk.committed_offset,
        ),
    )


def open_chunks(tx: sqlite3.Connection, epoch: int, count: int) -> list[Chunk]:
    found = tx.execute(  # keys first: asked for whole rows, SQLite would walk the epoch instead of the index
        f"SELECT {_CHUNK} FROM chunks NATURAL JOIN (SELECT epoch, block_id, chunk_id FROM chunks WHERE phase = 0 "
        f"AND {_UNFINISHED} AND epoch = ? ORDER BY block_id, chunk_id LIMIT ?) ORDER BY block_id, chunk_id",
        (epoch, count),
    )
    return [_chunk(row) for row in found.fetchall()]


def unfinished_chunks(tx: sqlite3.Connection, session: int | None = None) -> list[Chunk]:
    """Chunks leased or trained, of one session or of all; never more than are in hand."""
    found = [_chunk(row) for row in tx.execute(f"SELECT {_CHUNK} FROM chunks WHERE {_IN_HAND}").fetchall()]
    return found if session is None else [chunk for chunk in found if chunk.session == session]


def count_in_hand(tx: sqlite3.Connection) -> int:
    return tx.execute(f"SELECT count(*) FROM chunks WHERE {_IN_HAND}").fetchone()[0]


def has_unfinished(tx: sqlite3.Connection, epoch: int) -> bool:
    found = tx.execute(
        f"SELECT 1 FROM chunks WHERE phase IN (0, 1, 2) AND {_UNFINISHED} AND epoch = ? LIMIT 1", (epoch,)
    )
    return found.fetchone() is not None


def epoch_cursor(tx: sqlite3.Connection, epoch: int) -> ChunkRef | None:
    block_id, chunk_id = tx.execute(
        "SELECT cursor_block, cursor_chunk FROM epochs WHERE epoch = ?", (epoch,)
    ).fetchone()
    return None if block_id is None else ChunkRef(block_id, chunk_id)


def set_epoch_cursor(tx: sqlite3.Connection, epoch: int, ref: ChunkRef) -> None:
    tx.execute(
        "UPDATE epochs SET cursor_block = ?, cursor_chunk = ? WHERE epoch = ?", (ref.block_id, ref.chunk_id, epoch)
    )


def add_committed_samples(tx: sqlite3.Connection, epoch: int, samples: int) -> None:
    tx.execute("UPDATE epochs SET samples_committed = samples_committed + ? WHERE epoch = ?", (samples, epoch))


def block_samples(tx: sqlite3.Connection, block_id: int) -> int | None:
    found = tx.execute("SELECT sample_count FROM blocks WHERE block_id = ?", (block_id,)).fetchone()
    return found[0] if found else None


def commits(tx: sqlite3.Connection, last: int | None = None) -> list[Commit]:
    found = tx.execute(f"SELECT {_COMMIT} FROM commits ORDER BY seq DESC LIMIT ?", (-1 if last is None else last,))
    return [_commit(row) for row in reversed(found.fetchall())]


def last_commit(tx: sqlite3.Connection) -> Commit | None:
    found = tx.execute(f"SELECT {_COMMIT} FROM commits ORDER BY seq DESC LIMIT 1").fetchone()
    return _commit(found) if found else None


def commit_of(tx: sqlite3.Connection, checkpoint_id: str) -> Commit | None:
    found = tx.execute(f"SELECT {_COMMIT} FROM commits WHERE checkpoint_id = ?", (checkpoint_id,)).fetchone()
    return _commit(found) if found else None


def add_commit(tx: sqlite3.Connection, commit: Commit) -> None:
    tx.execute(f"INSERT INTO commits ({_COMMIT}) VALUES (?, ?, ?, ?, ?, ?)", astuple(commit))


def add_span(tx: sqlite3.Connection, span: Span) -> None:
    tx.execute(
        f"INSERT INTO spans ({_SPAN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            span.commit,
            span.epoch,
            span.ref.block_id,
            span.ref.chunk_id,
            span.start,
            span.stop,
            span.start_offset,
            span.stop_offset,
            span.steps,
            span.session,
        ),
    )


def spans(tx: sqlite3.Connection, epoch: int) -> list[Span]:
    found = tx.execute(f"SELECT {_SPAN} FROM spans WHERE epoch = ? ORDER BY block_id, chunk_id, commit_seq", (epoch,))
    return [_span(row) for row in found.fetchall()]


def spans_after(tx: sqlite3.Connection, seq: int) -> list[Span]:
    """Spans of later commits, the latest first."""
    found = tx.execute(f"SELECT {_SPAN} FROM spans WHERE commit_seq > ? ORDER BY commit_seq DESC", (seq,))
    return [_span(row) for row in found.fetchall()]


def pending(tx: sqlite3.Connection) -> list[Contribution]:
    found = tx.execute(
        "SELECT session_id, worker, sum(c.trained - c.committed), sum(c.steps), count(*) FROM "
        f"(SELECT * FROM chunks WHERE {_IN_HAND} AND (trained > committed OR offset_in > committed_offset OR phase = 2)"
        ") c JOIN sessions ON session_id = session WHERE state = 'active' GROUP BY session_id ORDER BY session_id"
    )
    return [
        Contribution(session_id=session_id, worker=worker, samples=samples, steps=steps, chunks=chunks)
        for session_id, worker, samples, steps, chunks in found.fetchall()
    ]


def _chunk(row: tuple) -> Chunk:
    epoch, block_id, chunk_id, samples, phase, session, token, trained, offset, steps, committed, committed_offset = row
    return Chunk(
        epoch=epoch,
        ref=ChunkRef(block_id, chunk_id),
        samples=samples,
        phase=Phase(phase),
        session=session,
        token=token,
        trained=trained,
        offset=offset,
        steps=steps,
        committed=committed,
        committed_offset=committed_offset,
    )


def _span(row: tuple) -> Span:
    seq, epoch, block_id, chunk_id, start, stop, start_offset, stop_offset, steps, session = row
    return Span(
        commit=seq,
        epoch=epoch,
        ref=ChunkRef(block_id, chunk_id),
        start=start,
        stop=stop,
        start_offset=start_offset,
        stop_offset=stop_offset,
        steps=steps,
        session=session,
    )


def _commit(row: tuple) -> Commit:
    seq, checkpoint_id, digest, epoch, total_steps, next_step = row
    return Commit(
        seq=seq,
        checkpoint_id=checkpoint_id,
        digest=digest,
        epoch=epoch,
        total_steps=total_steps,
        next_step=next_step,
    )

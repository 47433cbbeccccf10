"""Rows of the ledger's tables, to and from values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any

from penstock.ledger.base import Commit, Contribution, Lease, LoaderSpan
from penstock.ledger.database import Transaction
from penstock.ledger.exclusions import Exclusion
from penstock.ledger.state import Chunk, Phase, Span
from penstock.types import ChunkRef

_CHUNK = (
    "epoch, block_id, chunk_id, samples, phase, session, token, trained, offset_in, steps, committed, "
    "committed_offset, exclusions, rank"
)
_PLACES = f"({', '.join('?' * 15)})"
_UPDATES = ", ".join(f"{name} = excluded.{name}" for name in f"{_CHUNK}, request".split(", ")[3:])
_SPAN = "commit_seq, epoch, block_id, chunk_id, start, stop, start_offset, stop_offset, steps, session, exclusions"
_ADD_SPAN = f"INSERT INTO spans ({_SPAN}) VALUES ({', '.join('?' * 11)})"
_COMMIT = "seq, checkpoint_id, digest, epoch, total_steps, next_step, committed_at"
_LOADER_SPAN = "commit_seq, epoch, steps, samples, session, exclusions, state"
_EXCLUSION = "seq, epoch, step, block_id, start, stop, reason, excluded_at"
_ALL = 2**62


@dataclass(frozen=True, slots=True)
class Run:
    generation: int
    epoch: int
    total_steps: int
    next_step: int
    exclusions: int


def run(tx: Transaction) -> Run:
    return Run(*tx.execute("SELECT generation, epoch, total_steps, next_step, exclusions FROM run").fetchone())


def take_tokens(tx: Transaction, count: int) -> int:
    """The first of so many fencing tokens that nobody has had."""
    return tx.execute("UPDATE run SET next_token = next_token + ? RETURNING next_token", (count,)).fetchone()[0] - count


# -- chunks ------------------------------------------------------------------------------------------------------------


def chunk(tx: Transaction, epoch: int, ref: ChunkRef) -> Chunk | None:
    for table in ("chunks", "done_chunks"):
        found = tx.execute(
            f"SELECT {_CHUNK} FROM {table} WHERE epoch = ? AND block_id = ? AND chunk_id = ?{tx.locking}",
            (epoch, ref.block_id, ref.chunk_id),
        ).fetchone()
        if found:
            return _chunk(found)
    return None


def save_chunk(tx: Transaction, chunk: Chunk, request: int = 0) -> None:
    """Save a chunk in the table that it now belongs to."""
    done = chunk.phase in (Phase.COMMITTED, Phase.EXCLUDED)
    here, there = ("done_chunks", "chunks") if done else ("chunks", "done_chunks")
    if done or chunk.phase is Phase.OPEN:
        tx.execute(
            f"DELETE FROM {there} WHERE epoch = ? AND block_id = ? AND chunk_id = ?",
            (chunk.epoch, chunk.ref.block_id, chunk.ref.chunk_id),
        )
    tx.execute(
        f"INSERT INTO {here} ({_CHUNK}, request) VALUES {_PLACES} "
        f"ON CONFLICT (epoch, block_id, chunk_id) DO UPDATE SET {_UPDATES}",
        _values(chunk, request),
    )


def add_chunks(tx: Transaction, chunks: list[Chunk]) -> None:
    """Put open chunks on record that are not."""
    token = take_tokens(tx, len(chunks))
    values = [_values(replace(chunk, token=token + place), 0) for place, chunk in enumerate(chunks)]
    tx.execute_many(f"INSERT INTO chunks ({_CHUNK}, request) VALUES {_PLACES}", values)


def add_run_of_chunks(tx: Transaction, epoch: int, block_id: int, ids: range, size: int, last_size: int) -> None:
    """The same for neighbours in a block without a priority, in one statement."""
    token = take_tokens(tx, len(ids))
    tx.execute(
        f"INSERT INTO chunks ({_CHUNK}, request) WITH RECURSIVE place(at) AS "
        "(SELECT CAST(? AS BIGINT) UNION ALL SELECT at + 1 FROM place WHERE at < ?) "
        "SELECT ?, ?, at, CASE WHEN at = ? THEN ? ELSE ? END, 0, 0, at + ?, 0, 0, 0, 0, 0, 0, 0, 0 FROM place",
        (ids[0], ids[-1], epoch, block_id, ids[-1], last_size, size, token - ids[0]),
    )


def open_chunks(tx: Transaction, epoch: int, count: int, ranks: str) -> list[Chunk]:
    """The next ones to hand out among those of certain ranks, but for those that somebody is just being handed."""
    order = "block_id, chunk_id" if ranks == "= 0" else "rank, block_id, chunk_id"
    ranked = "" if ranks == "= 0" else " AND rank <> 0"  # word for word as in the index
    found = tx.execute(
        f"SELECT {_CHUNK} FROM chunks WHERE epoch = ? AND phase = 0 AND rank {ranks}{ranked} "
        f"ORDER BY {order} LIMIT ?{tx.skipping}",
        (epoch, count),
    )
    return [_chunk(row) for row in found.fetchall()]


def first_open_chunks(tx: Transaction, epoch: int, count: int) -> list[Chunk]:
    """Those without a priority, from where claims look for them on."""
    block_id, chunk_id = tx.execute("SELECT first_block, first_chunk FROM epochs WHERE epoch = ?", (epoch,)).fetchone()
    chunks: list[Chunk] = []
    for place, values in (("block_id = ? AND chunk_id >= ?", (block_id, chunk_id)), ("block_id > ?", (block_id,))):
        found = tx.execute(
            f"SELECT {_CHUNK} FROM chunks WHERE epoch = ? AND {place} AND phase = 0 AND rank = 0 "
            f"ORDER BY block_id, chunk_id LIMIT ?{tx.skipping}",
            (epoch, *values, count - len(chunks)),
        )
        chunks += [_chunk(row) for row in found.fetchall()]
    return chunks


def all_open_chunks(tx: Transaction, epoch: int) -> list[Chunk]:
    found = tx.execute(f"SELECT {_CHUNK} FROM chunks WHERE epoch = ? AND phase = 0{tx.skipping}", (epoch,))
    return [_chunk(row) for row in found.fetchall()]


def chunks_of_request(tx: Transaction, session: int, request: int) -> list[Chunk]:
    return [
        _chunk(row)
        for row in tx.execute(
            f"SELECT {_CHUNK} FROM chunks WHERE phase IN (1, 2) AND session = ? AND request = ?", (session, request)
        ).fetchall()
    ]


def unfinished_chunks(tx: Transaction, session: int | None = None) -> list[Chunk]:
    """Chunks leased or trained, of one session or of all; never more than are in hand."""
    which, values = ("", ()) if session is None else (" AND session = ?", (session,))
    found = tx.execute(
        f"SELECT {_CHUNK} FROM chunks WHERE phase IN (1, 2){which} ORDER BY epoch, block_id, chunk_id{tx.locking}",
        values,
    )
    return [_chunk(row) for row in found.fetchall()]


def count_in_hand(tx: Transaction) -> int:
    return tx.execute("SELECT count(*) FROM chunks WHERE phase IN (1, 2)").fetchone()[0]


def has_unfinished(tx: Transaction, epoch: int) -> bool:
    """Whether a chunk of an epoch is open or in hand."""
    return tx.execute("SELECT 1 FROM chunks WHERE epoch = ? LIMIT 1", (epoch,)).fetchone() is not None


def taken_places(tx: Transaction, epoch: int, first: ChunkRef, count: int) -> set[int]:
    """Which of so many chunks of a block from `first` on are on record in an epoch, or go by a priority."""
    place = (first.block_id, first.chunk_id, first.chunk_id + count)
    found = [
        row
        for table in ("chunks", "done_chunks")
        for row in tx.execute(
            f"SELECT chunk_id FROM {table} WHERE epoch = ? AND block_id = ? AND chunk_id >= ? AND chunk_id < ?",
            (epoch, *place),
        ).fetchall()
    ]
    ranked = tx.execute(
        "SELECT chunk_id FROM priorities WHERE block_id = ? AND chunk_id >= ? AND chunk_id < ? AND rank <> 0", place
    ).fetchall()
    return {chunk_id for (chunk_id,) in (*found, *ranked)}


def rank(tx: Transaction, ref: ChunkRef) -> float:
    """Where a chunk stands by its priority; 0 without one."""
    found = tx.execute(
        "SELECT rank FROM priorities WHERE block_id = ? AND chunk_id = ?", (ref.block_id, ref.chunk_id)
    ).fetchone()
    return found[0] if found else 0.0


# -- epochs ------------------------------------------------------------------------------------------------------------


def epoch_cursor(tx: Transaction, epoch: int) -> ChunkRef | None:
    block_id, chunk_id = tx.execute(
        "SELECT cursor_block, cursor_chunk FROM epochs WHERE epoch = ?", (epoch,)
    ).fetchone()
    return None if block_id is None else ChunkRef(block_id, chunk_id)


def set_epoch_cursor(tx: Transaction, epoch: int, ref: ChunkRef) -> None:
    tx.execute(
        "UPDATE epochs SET cursor_block = ?, cursor_chunk = ? WHERE epoch = ?", (ref.block_id, ref.chunk_id, epoch)
    )


def set_first_open(tx: Transaction, epoch: int, ref: ChunkRef, *, only_lower: bool) -> None:
    """Note where the search for open chunks without a priority starts; there may be some anywhere behind it."""
    tx.execute("UPDATE run SET first_changed = first_changed + 1")
    place = (ref.block_id, ref.chunk_id)
    sql = "UPDATE epochs SET first_block = ?, first_chunk = ? WHERE epoch = ?"
    if only_lower:
        tx.execute(f"{sql} AND (first_block, first_chunk) > (?, ?)", (*place, epoch, *place))
    else:
        tx.execute(sql, (*place, epoch))


def add_epoch(tx: Transaction, epoch: int) -> None:
    tx.execute("INSERT INTO epochs VALUES (?, NULL, NULL, 0, 0, NULL, NULL, NULL, 0)", (epoch,))


def add_committed_samples(tx: Transaction, epoch: int, samples: int) -> None:
    tx.execute("UPDATE epochs SET samples_committed = samples_committed + ? WHERE epoch = ?", (samples, epoch))


# -- blocks ------------------------------------------------------------------------------------------------------------


def block(tx: Transaction, block_id: int) -> tuple[int, str] | None:
    """Sample count and checksum a block had when it was first used."""
    found = tx.execute("SELECT sample_count, checksum FROM blocks WHERE block_id = ?", (block_id,)).fetchone()
    return tuple(found) if found else None


# -- commits -----------------------------------------------------------------------------------------------------------


def commits(tx: Transaction, last: int | None = None) -> list[Commit]:
    found = tx.execute(f"SELECT {_COMMIT} FROM commits ORDER BY seq DESC LIMIT ?", (_ALL if last is None else last,))
    return [_commit(row) for row in reversed(found.fetchall())]


def last_commit(tx: Transaction) -> Commit | None:
    found = tx.execute(f"SELECT {_COMMIT} FROM commits ORDER BY seq DESC LIMIT 1").fetchone()
    return _commit(found) if found else None


def commit_of(tx: Transaction, checkpoint_id: str) -> Commit | None:
    found = tx.execute(f"SELECT {_COMMIT} FROM commits WHERE checkpoint_id = ?", (checkpoint_id,)).fetchone()
    return _commit(found) if found else None


def add_commit(tx: Transaction, commit: Commit) -> None:
    tx.execute(f"INSERT INTO commits ({_COMMIT}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(commit))


def add_span(tx: Transaction, span: Span) -> None:
    tx.execute(_ADD_SPAN, _span_values(span))


def save_committed(tx: Transaction, bound: list[tuple[Chunk, Span]]) -> None:
    """Save chunks of which a commit now holds more, and what it holds of them: some statements for all of them."""
    if not bound:
        return
    done = [chunk for chunk, _ in bound if chunk.phase is Phase.COMMITTED]
    tx.execute_many(
        "DELETE FROM chunks WHERE epoch = ? AND block_id = ? AND chunk_id = ?",
        [(chunk.epoch, chunk.ref.block_id, chunk.ref.chunk_id) for chunk in done],
    )
    for table, chunks in (("done_chunks", done), ("chunks", [c for c, _ in bound if c.phase is not Phase.COMMITTED])):
        tx.execute_many(
            f"INSERT INTO {table} ({_CHUNK}, request) VALUES {_PLACES} "
            f"ON CONFLICT (epoch, block_id, chunk_id) DO UPDATE SET {_UPDATES}",
            [_values(chunk, 0) for chunk in chunks],
        )
    tx.execute_many(_ADD_SPAN, [_span_values(span) for _, span in bound])
    add_committed_samples(tx, bound[0][1].epoch, sum(span.stop - span.start for _, span in bound))


def spans(tx: Transaction, epoch: int) -> list[Span]:
    found = tx.execute(f"SELECT {_SPAN} FROM spans WHERE epoch = ? ORDER BY block_id, chunk_id, commit_seq", (epoch,))
    return [_span(row) for row in found.fetchall()]


def spans_after(tx: Transaction, seq: int) -> list[Span]:
    """Spans of later commits, the latest first."""
    found = tx.execute(f"SELECT {_SPAN} FROM spans WHERE commit_seq > ? ORDER BY commit_seq DESC", (seq,))
    return [_span(row) for row in found.fetchall()]


def add_loader_span(tx: Transaction, span: LoaderSpan) -> None:
    tx.execute(
        f"INSERT INTO loader_spans ({_LOADER_SPAN}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (span.commit, span.epoch, span.steps, span.samples, span.session, span.exclusions, span.state),
    )


def loader_spans(tx: Transaction, last: int | None = None) -> list[LoaderSpan]:
    found = tx.execute(
        f"SELECT {_LOADER_SPAN} FROM loader_spans ORDER BY commit_seq DESC LIMIT ?", (_ALL if last is None else last,)
    )
    return [_loader_span(row) for row in reversed(found.fetchall())]


def loader_spans_after(tx: Transaction, seq: int) -> list[LoaderSpan]:
    found = tx.execute(f"SELECT {_LOADER_SPAN} FROM loader_spans WHERE commit_seq > ?", (seq,))
    return [_loader_span(row) for row in found.fetchall()]


def pending(tx: Transaction) -> list[Contribution]:
    found = tx.execute(
        "SELECT session_id, worker, CAST(sum(trained - committed) AS BIGINT), CAST(sum(c.steps) AS BIGINT), count(*) "
        "FROM (SELECT * FROM chunks WHERE phase IN (1, 2) "
        "AND (trained > committed OR offset_in > committed_offset OR phase = 2)) c "
        "JOIN sessions ON session_id = session WHERE state = 'active' GROUP BY session_id, worker ORDER BY session_id"
    )
    return [
        Contribution(session_id=session_id, worker=worker, samples=samples, steps=steps, chunks=chunks)
        for session_id, worker, samples, steps, chunks in found.fetchall()
    ]


# -- exclusions --------------------------------------------------------------------------------------------------------


def exclusions(tx: Transaction) -> list[Exclusion]:
    found = tx.execute(f"SELECT {_EXCLUSION} FROM exclusions ORDER BY seq").fetchall()
    names = _EXCLUSION.split(", ")
    return [Exclusion(**dict(zip(names, row, strict=True))) for row in found]


def add_exclusion(tx: Transaction, entry: Exclusion, request: int) -> None:
    tx.execute(
        f"INSERT INTO exclusions ({_EXCLUSION}, request) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*astuple(entry), request)
    )


# -- values ------------------------------------------------------------------------------------------------------------


def lease(chunk: Chunk, excluded: Iterable[tuple[int, int]]) -> Lease:
    return Lease(
        session_id=chunk.session,
        token=chunk.token,
        epoch=chunk.epoch,
        ref=chunk.ref,
        samples=chunk.samples,
        start=chunk.committed,
        start_offset=chunk.committed_offset,
        excluded=tuple(excluded),
    )


def _span_values(span: Span) -> tuple[object, ...]:
    return (
        *(span.commit, span.epoch, span.ref.block_id, span.ref.chunk_id, span.start, span.stop),
        *(span.start_offset, span.stop_offset, span.steps, span.session, span.exclusions),
    )


def _values(chunk: Chunk, request: int) -> tuple[object, ...]:
    return (
        *(chunk.epoch, chunk.ref.block_id, chunk.ref.chunk_id, chunk.samples, int(chunk.phase), chunk.session),
        *(chunk.token, chunk.trained, chunk.offset, chunk.steps, chunk.committed, chunk.committed_offset),
        *(chunk.exclusions, chunk.rank, request),
    )


def _chunk(row: Any) -> Chunk:
    (epoch, block_id, chunk_id, samples, phase, session, token, trained, offset, steps, committed) = row[:11]
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
        committed_offset=row[11],
        exclusions=row[12],
        rank=row[13],
    )


def _span(row: Any) -> Span:
    seq, epoch, block_id, chunk_id, start, stop, start_offset, stop_offset, steps, session, exclusions = row
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
        exclusions=exclusions,
    )


def _loader_span(row: Any) -> LoaderSpan:
    commit, epoch, steps, samples, session, exclusions, state = row
    return LoaderSpan(
        commit=commit,
        epoch=epoch,
        steps=steps,
        samples=samples,
        session=session,
        exclusions=exclusions,
        state=state,
    )


def _commit(row: Any) -> Commit:
    return Commit(**dict(zip(_COMMIT.split(", "), row, strict=True)))

"""What a chunk tracker keeps in the tables: a chunk is one sample there, and a commit of its own when complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from penstock.errors import LedgerError
from penstock.ledger import rows, state
from penstock.ledger.base import Commit
from penstock.ledger.database import Transaction
from penstock.ledger.state import Chunk
from penstock.types import ChunkRef


def register_block(tx: Transaction, block_id: int, total_chunks: int) -> None:
    known = rows.block(tx, block_id)
    if known is None:
        tx.execute("INSERT INTO blocks VALUES (?, ?, 'tracked')", (block_id, total_chunks))
    elif known[0] != total_chunks:
        raise LedgerError(
            f"block {block_id} has {known[0]} chunks, got total_chunks={total_chunks}: "
            "go back to the chunk size this training began with, or begin another"
        )


def next_chunk(tx: Transaction, epoch: int, block_id: int, total_chunks: int) -> Chunk | None:
    """A chunk that came back, or the first that nobody has had."""
    returned = tx.execute(
        "SELECT chunk_id FROM chunks WHERE epoch = ? AND block_id = ? AND phase = 0 ORDER BY chunk_id LIMIT 1",
        (epoch, block_id),
    ).fetchone()
    if returned is not None:
        return rows.chunk(tx, epoch, ChunkRef(block_id, returned[0]))
    had = [
        tx.execute(f"SELECT max(chunk_id) FROM {table} WHERE epoch = ? AND block_id = ?", (epoch, block_id)).fetchone()[
            0
        ]
        for table in ("chunks", "done_chunks")
    ]
    following = max((chunk_id for chunk_id in had if chunk_id is not None), default=-1) + 1
    if following >= total_chunks:
        return _gap(tx, epoch, block_id, total_chunks)
    token = rows.take_tokens(tx, 1)
    return Chunk(epoch=epoch, ref=ChunkRef(block_id, following), samples=1, token=token)


def commit_chunk(tx: Transaction, chunk: Chunk, facts: dict[str, int], step: int) -> None:
    """Bind a trained chunk at once to a commit of its own, which keeps what was told about it."""
    last, run = rows.last_commit(tx), rows.run(tx)
    seq = last.seq + 1 if last else 1
    moved, span = state.commit(replace(chunk, steps=0), seq)
    assert span is not None, f"nothing to commit: {chunk}"
    rows.save_chunk(tx, moved)
    rows.add_span(tx, span)
    rows.add_committed_samples(tx, chunk.epoch, 1)
    total_steps = max(run.total_steps, step)
    rows.add_commit(
        tx,
        Commit(
            seq=seq,
            checkpoint_id=f"{chunk.epoch}/{chunk.ref.block_id}/{chunk.ref.chunk_id}",
            digest=orjson.dumps(facts).decode(),
            epoch=chunk.epoch,
            total_steps=total_steps,
            next_step=run.next_step,
            committed_at=tx.wall_time(),
        ),
    )
    tx.execute("UPDATE run SET total_steps = ?", (total_steps,))


def completed(tx: Transaction, epoch: int | None) -> list[dict[str, int]]:
    """What was told about each completed chunk, in order."""
    which, values = ("", ()) if epoch is None else (" WHERE s.epoch = ?", (epoch,))
    found: Sequence[Any] = tx.execute(
        "SELECT s.block_id, s.chunk_id, c.digest FROM spans s JOIN commits c ON c.seq = s.commit_seq"
        f"{which} ORDER BY s.epoch, s.block_id, s.chunk_id",
        values,
    ).fetchall()
    return [{"block_id": block, "chunk_id": chunk, **orjson.loads(facts)} for block, chunk, facts in found]


def done_by_block(tx: Transaction, epoch: int) -> list[tuple[int, int]]:
    return [
        (block_id, count)
        for block_id, count in tx.execute(
            "SELECT block_id, count(*) FROM done_chunks WHERE epoch = ? GROUP BY block_id ORDER BY block_id", (epoch,)
        ).fetchall()
    ]


def _gap(tx: Transaction, epoch: int, block_id: int, total_chunks: int) -> Chunk | None:
    """A chunk that a state file left out between others."""
    count = sum(
        tx.execute(f"SELECT count(*) FROM {table} WHERE epoch = ? AND block_id = ?", (epoch, block_id)).fetchone()[0]
        for table in ("chunks", "done_chunks")
    )
    if count >= total_chunks:
        return None
    taken = rows.taken_places(tx, epoch, ChunkRef(block_id, 0), total_chunks)
    missing = next(chunk_id for chunk_id in range(total_chunks) if chunk_id not in taken)
    return Chunk(epoch=epoch, ref=ChunkRef(block_id, missing), samples=1, token=rows.take_tokens(tx, 1))

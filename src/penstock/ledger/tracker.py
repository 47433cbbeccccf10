"""`ChunkTracker`: the small face of a ledger, for trainers that bring their own loop and data.

It knows blocks by number and how many chunks each has, learned from whoever asks first. Completing a chunk commits it
at once. Claims are exclusive for threads, processes and, in PostgreSQL, machines, and renewed while this process lives.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import LeaseLost, LedgerError
from penstock.ledger import rows, state, tracked
from penstock.ledger.base import Session
from penstock.ledger.database import Database, Transaction
from penstock.ledger.handing import Handing, require_active
from penstock.ledger.opening import open_database
from penstock.ledger.operations import SqlLedger
from penstock.ledger.postgres_url import is_postgres
from penstock.ledger.sqlite import boot_id
from penstock.ledger.state import Chunk, Phase, Progress
from penstock.storage import open_storage
from penstock.types import ChunkRef, DatasetIdentity

_log = logging.getLogger(__name__)

STATE_KEY = "chunk_tracker_state.json"
LEDGER_KEY = "chunk_tracker.sqlite"
_IDENTITY = DatasetIdentity(dataset_id="chunk tracker", block_size=1, chunk_size=1)


class ChunkTracker:
    """Which chunks of which blocks were trained, by whom, in this epoch.

    Args:
        path: A folder, a ledger file or a state file in it (``chunk_tracker_state.json``), or ``postgresql://...?run=``.
            Where there is a state file and no ledger yet, the state is taken over.
        session_timeout_s: How long a process that died keeps its chunks; one found dead on this machine loses them as
            soon as somebody asks.
    """

    def __init__(self, path: str | os.PathLike[str], *, session_timeout_s: float = 60.0) -> None:
        self._path = os.fspath(path)
        self._session_timeout_s = session_timeout_s
        self._lock = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self._pid = 0
        self._stop = threading.Event()
        self._complete_epoch: int | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self._path, self._session_timeout_s)

    def __enter__(self) -> ChunkTracker:
        _ = self._ledger
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- claims --------------------------------------------------------------------------------------------------------

    def get_next_untrained_chunk(self, block_id: int, total_chunks: int, gpu_id: int) -> int | None:
        """Claim the next chunk of a block for a GPU; None where nothing of it can be claimed now."""
        if block_id < 0 or total_chunks < 0:
            raise LedgerError(f"block {block_id} with {total_chunks} chunks cannot be: expected 0 or more of both")
        session, request = self._session(gpu_id), self._db.new_request()

        def claim(tx: Transaction) -> int | None:
            require_active(tx, session.session_id)
            if request and (had := rows.chunks_of_request(tx, session.session_id, request)):
                return had[0].ref.chunk_id
            self._handing.fence_silent(tx, but=session.session_id)
            self._end_the_dead(tx)
            tracked.register_block(tx, block_id, total_chunks)
            chunk = tracked.next_chunk(tx, rows.run(tx).epoch, block_id, total_chunks)
            if chunk is None:
                return None
            rows.save_chunk(tx, state.lease(chunk, session.session_id, 0), request)
            return chunk.ref.chunk_id

        return self._db.change("claim", claim)

    def mark_chunk_complete(self, block_id: int, chunk_id: int, gpu_id: int, step: int, samples_trained: int) -> None:
        """A claimed chunk is trained; durable when this returns. A second time changes nothing.

        Args:
            block_id: The block, and
            chunk_id: the chunk in it that was claimed.
            gpu_id: Who claimed it; `LeaseLost` where that was somebody else, or too long ago.
            step: Steps of the run so far; the greatest one told is `total_steps`.
            samples_trained: Samples of the chunk.
        """
        session = self._session(gpu_id)
        facts = {"gpu_id": gpu_id, "step": step, "samples_trained": samples_trained}

        def complete(tx: Transaction) -> None:
            chunk = rows.chunk(tx, rows.run(tx).epoch, ChunkRef(block_id, chunk_id))
            if chunk is not None and chunk.phase is Phase.COMMITTED:
                return
            if chunk is None or chunk.phase is Phase.OPEN or chunk.session != session.session_id:
                raise LeaseLost(
                    f"chunk {chunk_id} of block {block_id} is not claimed by GPU {gpu_id}: claim it with "
                    "get_next_untrained_chunk; if it was silent too long, somebody else trains it"
                )
            require_active(tx, session.session_id)
            tracked.commit_chunk(tx, state.complete(chunk, session.session_id, chunk.token, _WHOLE), facts, step)

        self._db.change("complete", complete, durable=True)

    # -- epochs --------------------------------------------------------------------------------------------------------

    def check_epoch_complete(self, total_blocks: int | None) -> bool:
        """Whether every chunk of every block is trained; not while the number of blocks is unknown (None)."""
        if total_blocks is None:
            return False

        def is_complete(tx: Transaction) -> int | None:
            epoch = rows.run(tx).epoch
            sizes = dict(tx.execute("SELECT block_id, sample_count FROM blocks").fetchall())
            done = dict(tracked.done_by_block(tx, epoch))
            whole = all(block in sizes and done.get(block, 0) >= sizes[block] for block in range(total_blocks))
            return epoch if whole else None

        epoch = self._opened.read(is_complete)
        if epoch is not None:
            self._complete_epoch = epoch
        return epoch is not None

    def start_new_epoch(self) -> int:
        """Begin the epoch after the one that this tracker saw complete; returns the current one.

        However many trackers saw the same end, one of them begins it.
        """
        if self._complete_epoch is None:
            raise LedgerError("no epoch was seen complete: ask check_epoch_complete before start_new_epoch")
        seen = self._complete_epoch

        def start(tx: Transaction) -> int:
            current = rows.run(tx).epoch
            if current != seen:
                return current
            tx.execute("UPDATE run SET epoch = epoch + 1")
            rows.add_epoch(tx, seen + 1)
            return seen + 1

        return self._opened.change("advance_epoch", start, durable=True)

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        return self._opened.read(lambda tx: rows.run(tx).total_steps)

    @property
    def current_epoch(self) -> int:
        return self._opened.read(lambda tx: rows.run(tx).epoch)

    def get_progress_stats(self) -> dict[str, int]:
        """Where the training stands."""

        def look(tx: Transaction) -> dict[str, int]:
            run = rows.run(tx)
            done = tracked.done_by_block(tx, run.epoch)
            return {
                "total_steps": run.total_steps,
                "current_epoch": run.epoch,
                "blocks_this_epoch": len(done),
                "chunks_this_epoch": sum(chunks for _, chunks in done),
                "chunks_in_progress": rows.count_in_hand(tx),
                "total_chunks_trained": tx.execute("SELECT count(*) FROM done_chunks").fetchone()[0],
                "total_samples_trained": sum(facts["samples_trained"] for facts in tracked.completed(tx, None)),
            }

        return self._opened.read(look)

    def save(self) -> None:
        """Write ``chunk_tracker_state.json`` beside the ledger; whole or not at all."""
        self._storage.put(self._state_key, orjson.dumps(self.state(), option=orjson.OPT_INDENT_2))

    def state(self) -> dict[str, Any]:
        """The state of the current epoch."""

        def look(tx: Transaction) -> dict[str, Any]:
            run = rows.run(tx)
            return {
                "completed_chunks": tracked.completed(tx, run.epoch),
                "current_epoch": run.epoch,
                "blocks_this_epoch": [block_id for block_id, _ in tracked.done_by_block(tx, run.epoch)],
                "total_steps": run.total_steps,
            }

        return self._opened.read(look)

    def close(self) -> None:
        """Give back what is claimed and not complete; used again, it opens again."""
        with self._lock:
            sessions = list(self._sessions.values()) if self._pid == os.getpid() else []
            self._sessions = {}
            self._stop.set()
        for session in sessions:
            self._ledger.leave(session)
        self._db.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    @cached_property
    def _db(self) -> Database:
        if is_postgres(self._path):
            return open_database(self._path)
        path = Path(self._path)
        if path.suffix == ".json":
            return open_database(path.with_name(LEDGER_KEY))
        return open_database(path / LEDGER_KEY if path.is_dir() or not path.suffix else path)

    @property
    def _opened(self) -> Database:
        """The database of a ledger that is there."""
        _ = self._ledger
        return self._db

    @cached_property
    def _ledger(self) -> SqlLedger:
        ledger = SqlLedger(self._db, identity=_IDENTITY, supply=None, session_timeout_s=self._session_timeout_s)
        ledger.open()
        if self._db.read(lambda tx: rows.run(tx).next_step) == _UNSEEN:
            self._take_over()
        return ledger

    @cached_property
    def _handing(self) -> Handing:
        return Handing(self._db, None)

    @property
    def _folder(self) -> Path:
        if is_postgres(self._path):
            return Path.cwd()
        path = Path(self._path)
        return path if path.is_dir() or not path.suffix else path.parent

    @cached_property
    def _storage(self) -> Any:
        return open_storage(self._folder)

    @property
    def _state_key(self) -> str:
        return Path(self._path).name if self._path.endswith(".json") else STATE_KEY

    def _session(self, gpu_id: int) -> Session:
        """The session of a GPU in this process; a forked one has its own."""
        ledger = self._ledger
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._sessions, self._stop = os.getpid(), {}, threading.Event()
            if self._stop.is_set():
                self._stop = threading.Event()
            if not self._sessions:
                threading.Thread(target=self._beat, args=(self._stop,), name="tracker heartbeat", daemon=True).start()
            if gpu_id not in self._sessions:
                self._sessions[gpu_id] = ledger.join(f"gpu {gpu_id} {_place()}", generation=0, pid=os.getpid())
            return self._sessions[gpu_id]

    def _beat(self, stop: threading.Event) -> None:
        """Renew all sessions of this process; one that was fenced is forgotten, and the next claim joins anew."""
        while not stop.wait(self._session_timeout_s / 4):
            with self._lock:
                sessions = dict(self._sessions)
            for gpu_id, session in sessions.items():
                try:
                    self._ledger.heartbeat(session)
                except LeaseLost:
                    with self._lock:
                        self._sessions.pop(gpu_id, None)
                except LedgerError as error:  # the next claim or completion meets the same error and tells its caller
                    _log.warning("heartbeat of GPU %d failed: %s", gpu_id, error)
        self._db.close()

    def _end_the_dead(self, tx: Transaction) -> None:
        """End sessions of processes that were seen from here and are gone: their chunks come back at once."""
        here = f" {_place()}"
        for session_id, worker, pid in tx.execute(
            "SELECT session_id, worker, pid FROM sessions WHERE state = 'active'"
        ).fetchall():
            if worker.endswith(here) and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
                self._handing.end_session(tx, session_id, "fenced")

    def _take_over(self) -> None:
        """Begin where a state file stands, if there is one; once, before anything else."""
        found: Any = {"completed_chunks": [], "current_epoch": 0, "total_steps": 0}
        try:
            if not is_postgres(self._path) and self._storage.exists(self._state_key):
                found = orjson.loads(self._storage.get(self._state_key))
            epoch, steps = int(found["current_epoch"]), int(found["total_steps"])
            chunks = [
                (ChunkRef(int(each["block_id"]), int(each["chunk_id"])), {name: int(each[name]) for name in _FACTS})
                for each in found["completed_chunks"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{self._folder / self._state_key} is no state of a chunk tracker ({error!r}): "
                "expected completed_chunks, current_epoch, blocks_this_epoch and total_steps; move it away"
            ) from error

        def take_over(tx: Transaction) -> None:
            if rows.run(tx).next_step != _UNSEEN:
                return  # somebody was faster
            tx.execute("UPDATE run SET next_step = next_step + 1")
            for number in range(1, epoch + 1):
                rows.add_epoch(tx, number)
            tx.execute("UPDATE run SET epoch = ?, total_steps = ?", (epoch, steps))
            for ref, facts in dict(chunks).items():
                trained = Chunk(epoch=epoch, ref=ref, samples=1, phase=Phase.TRAINED, trained=1, offset=1)
                tracked.commit_chunk(tx, trained, facts, 0)

        self._db.change("take_over", take_over, durable=True)


_WHOLE = Progress(samples=1, offset=1, steps=0)
_UNSEEN = 1
"""The next step of a ledger whose tracker has not looked for a state file yet; a tracker takes no steps."""
_FACTS = ("gpu_id", "step", "samples_trained")


def _unpickled(path: str, session_timeout_s: float) -> ChunkTracker:
    return ChunkTracker(path, session_timeout_s=session_timeout_s)


def _place() -> str:
    """This machine, this boot and this process's view of others: whose numbers mean the same processes."""
    try:
        return f"{boot_id()}:{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{boot_id()}:{os.getpid()}"

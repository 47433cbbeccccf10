"""The embedded database: one SQLite file in WAL mode, for any number of threads and processes of one machine."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import LedgerError
from penstock.faults import reach
from penstock.ledger import connections, frequent
from penstock.ledger.database import Move, Result, Rows
from penstock.ledger.mounts import network_file_system
from penstock.ledger.schema import FIRST_ROWS, TABLES, VERSION

_APPLICATION_ID = 0x50454E53  # "PENS", so that another program's database is told from ours
_BUSY_TIMEOUT_S = 180.0
_LOG_POLL_S = 0.01
_PAGE_BYTES = 1024
"""Rows are small and a transaction changes one: a page of the usual 4096 bytes is copied and checked for nothing."""
_LOG_PAGES = 4000
_LOOKS = 4
"""How often a claim looks for a chunk without the write lock before it looks under it."""
_SMALLEST_BYTES = 512  # SQLite would take a smaller file for an empty database, and overwrite it
_RENEW = frequent.RENEW.format(now="?")
_NO_DATABASE = (
    "{path} is not a ledger: it is no SQLite file; restore it from a copy, or begin a new run in another folder"
)


class SqliteTransaction:
    """Statements on one connection, between BEGIN and COMMIT."""

    again = False  # a connection to a file is not lost
    locking = skipping = ""  # there is one writer at a time

    def __init__(self, database: SqliteDatabase, connection: sqlite3.Connection) -> None:
        self._database = database
        self._connection = connection

    def execute(self, sql: str, values: Sequence[object] = (), /) -> Rows:
        return self._connection.execute(sql, values)  # pyright: ignore[reportArgumentType]

    def execute_many(self, sql: str, rows: Sequence[Sequence[object]], /) -> None:
        self._connection.executemany(sql, rows)  # pyright: ignore[reportArgumentType]

    def claim_open(self, session_id: int, count: int, request: int, /) -> list[Any]:
        return []  # a transaction is short here, and so is the queue before it

    def now(self) -> float:
        return self._database.now()

    def wall_time(self) -> float:
        return self._database.wall_time()

    def boot_id(self) -> str:
        return self._database.boot_id()


class SqliteDatabase:
    """Connections to one ledger file: one a thread, made on first use, never carried into another process."""

    restock_every = 0

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._local = threading.local()
        self._looked = (-1, 0)
        self._alone: tuple[int, ...] | None = None
        """What was claimed last, where nobody else had claimed since the claim before."""

    def __reduce__(self) -> tuple[object, ...]:
        return SqliteDatabase, (str(self.path),)

    @property
    def url(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Whether there is a ledger; a file that is something else is refused, and left as it is."""
        network = network_file_system(self.path)
        if network:
            raise LedgerError(
                f"{self.path} is on a network file system ({network}), where SQLite's locks do not hold: "
                "put the run on a local disk"
            )
        with _translated(self.path):
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            size = self.path.stat().st_size if self.path.exists() else 0
        if size == 0:
            return False  # nothing yet, or its creator was killed before the first write
        if size < _SMALLEST_BYTES:
            raise LedgerError(_NO_DATABASE.format(path=self.path))
        with self._reading() as connection:  # one view of it all: somebody may be creating it right now
            found = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if found == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                return False
        if found != _APPLICATION_ID:
            raise LedgerError(f"{self.path} is a database of another program: move it away or name another run")
        if version != VERSION:
            raise LedgerError(
                f"{self.path} has schema version {version}, expected {VERSION}: "
                "it was written by another version of penstock; use that one for this run"
            )
        return True

    def create(self, identity: Sequence[object]) -> None:
        """Make the tables and the first rows, in one transaction; nothing where another process was faster."""
        with _translated(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._begin_log()
        with self._changing("create", durable=True) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                return
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute(FIRST_ROWS[0], identity)  # pyright: ignore[reportArgumentType]
            connection.execute(FIRST_ROWS[1])
        with _translated(self.path):  # into the file itself, as far as nobody else is reading
            self._connection().execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _begin_log(self) -> None:
        """Switch to the write-ahead log. Here SQLite does not wait for others who do the same, so this does."""
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                self._connection().execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                self._connection().execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_LOG_POLL_S)

    def change(self, operation: str, body: Callable[[SqliteTransaction], Result], *, durable: bool = False) -> Result:
        with self._changing(operation, durable=durable) as connection:
            return body(SqliteTransaction(self, connection))

    def read(self, body: Callable[[SqliteTransaction], Result]) -> Result:
        with self._reading() as connection:
            return body(SqliteTransaction(self, connection))

    def claim_open(self, session_id: int, count: int, request: int) -> list[Any]:
        now, boot = self.now(), self.boot_id()
        look = (*self._looked, session_id, now, boot, count)
        try:
            run = self._connection().execute
            if count == 1 and (last := self._alone) is not None:
                epoch, block_id, chunk_id, samples, token, _, _, exclusions, first_changed = last
                reach("ledger.before_transaction", "claim")
                place = (epoch, block_id, chunk_id + 1)
                values = (session_id, *place, token + 1, samples, exclusions, first_changed, now, boot)
                if run(frequent.SQLITE_NEXT, values).rowcount == 1:
                    return self._claimed([(*place, samples, token + 1, 0, 0, exclusions, first_changed)])
            for _ in range(_LOOKS if count == 1 else 0):
                found = run(frequent.SQLITE_OPEN, look).fetchall()
                if not found or self._lease(run, session_id, found[0]):
                    return self._claimed(found)
                # Somebody was faster. A look under the lock would find the chunk for certain, and hold up all others.
            run("BEGIN IMMEDIATE")
            try:
                found = run(frequent.SQLITE_OPEN, look).fetchall()
                found = [row for row in found if self._lease(run, session_id, row)]
            except BaseException:
                run("ROLLBACK")
                raise
            run("COMMIT")
            return self._claimed(found)
        except (sqlite3.Error, OSError) as error:
            raise self._given_up(error) from error

    def _claimed(self, found: list[Any]) -> list[Any]:
        if found:
            alone = self._looked == (found[0][8], found[0][2])
            self._alone = found[-1] if alone else None
            self._looked = found[0][8], found[-1][2] + 1
            reach("ledger.after_transaction", "claim")
        return found

    @staticmethod
    def _lease(run: Callable[..., sqlite3.Cursor], session_id: int, found: tuple[int, ...]) -> bool:
        """Lease a chunk as it was seen; False where it has changed since, or the session was fenced."""
        epoch, block_id, chunk_id, _, token, _, _, exclusions, _ = found
        reach("ledger.before_transaction", "claim")
        values = (session_id, exclusions, epoch, block_id, chunk_id, token, session_id)
        return run(frequent.SQLITE_LEASE, values).rowcount == 1

    def move_chunk(self, name: Move, values: Sequence[object]) -> bool:
        return self._one(name, frequent.MOVE[name], values)

    def renew(self, session_id: int, timeout_s: float) -> float | None:
        now = self.now()
        renewed = self._one("heartbeat", _RENEW, (now, timeout_s, self.boot_id(), session_id))
        return now + timeout_s if renewed else None

    def _one(self, operation: str, sql: str, values: Sequence[object]) -> bool:
        """One statement as a transaction of its own; whether it changed anything."""
        reach("ledger.before_transaction", operation)
        try:
            changed = self._connection().execute(sql, values).rowcount > 0  # pyright: ignore[reportArgumentType]
        except (sqlite3.Error, OSError) as error:
            raise self._given_up(error) from error
        if changed:
            reach("ledger.after_transaction", operation)
        return changed

    def _given_up(self, error: Exception) -> LedgerError:
        """Leave no transaction open behind an error, and put it in a sentence."""
        connection = getattr(self._local, "connection", None)
        if connection is not None and connection.in_transaction:
            connection.execute("ROLLBACK")
        return _translation(self.path, error)

    def new_request(self) -> int:
        return 0

    @contextmanager
    def _changing(self, operation: str, *, durable: bool) -> Iterator[sqlite3.Connection]:
        with _translated(self.path):
            connection = self._connection()
            if durable:
                connection.execute("PRAGMA synchronous = FULL")
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                reach("ledger.before_transaction", operation)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                if durable:
                    connection.execute("PRAGMA synchronous = NORMAL")
            reach("ledger.after_transaction", operation)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with _translated(self.path):
            connection = self._connection()
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def close(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connections.close(connection)
            self._local.connection = None

    def now(self) -> float:
        """Seconds since this machine booted, sleep included: no user and no time server can set it."""
        return time.clock_gettime(_CLOCK)

    def wall_time(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        """Names this boot: deadlines of another boot mean nothing."""
        return boot_id()

    def _connection(self) -> sqlite3.Connection:
        kept = getattr(self._local, "connection", None)
        if kept is not None and connections.is_open(kept):
            return kept
        options = "?immutable=1" if self._is_archived() else ""
        connection = connections.connect(self.path, options=options, timeout_s=_BUSY_TIMEOUT_S)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        self._local.connection = connection
        return connection

    def _is_archived(self) -> bool:
        """Whether the ledger lies where nobody writes it: SQLite would want to write there even to read it."""
        folder, log = self.path.absolute().parent, self.path.with_name(self.path.name + "-wal")
        return self.path.exists() and not os.access(folder, os.W_OK) and not log.exists()


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@cache
def boot_id() -> str:
    """Names this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"booted-{int((time.time() - time.clock_gettime(_CLOCK)) // 60)}"


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _translation(path, error) from error


def _translation(path: Path, error: Exception) -> LedgerError:
    text = str(error)
    if isinstance(error, OSError):
        return LedgerError(f"{path} cannot be used: {error.strerror or error}")
    if isinstance(error, sqlite3.OperationalError):
        if "locked" in text or "busy" in text:
            return LedgerError(
                f"{path} was locked by another process for {_BUSY_TIMEOUT_S:.0f} s: find that process and end it"
            )
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return LedgerError(
                f"no space left to write {path}: free some space and run the same command again; "
                "the last commit is kept"
            )
        return LedgerError(f"{path} cannot be used: {text}: check the folder, its permissions and free space")
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
        return LedgerError(_NO_DATABASE.format(path=path))
    return LedgerError(f"{path} is damaged ({error}): restore it from a copy, or begin a new run in another folder")

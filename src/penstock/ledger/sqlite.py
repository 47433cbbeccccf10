"""The embedded database: one SQLite file in WAL mode, for any number of threads and processes of one machine."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from penstock.errors import LedgerError
from penstock.faults import reach
from penstock.ledger import connections
from penstock.ledger.mounts import network_file_system
from penstock.ledger.schema import TABLES, VERSION

_APPLICATION_ID = 0x50454E53  # "PENS", so that another program's database is told from ours
_BUSY_TIMEOUT_S = 180.0
_LOG_POLL_S = 0.01
_SMALLEST_BYTES = 512  # SQLite would take a smaller file for an empty database, and overwrite it
_NO_DATABASE = "{path} is not a ledger: it is no SQLite file; move it away or name another run"


class SqliteDatabase:
    """Connections to one ledger file: one a thread, made on first use, never carried into another process."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._local = threading.local()

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
        with self.reading() as connection:  # one view of it all: somebody may be creating it right now
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

    def create(self, first_row: tuple[object, ...]) -> None:
        """Make the tables and the run's row, in one transaction; nothing where another process was faster."""
        with _translated(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._begin_log()
        with self.transaction("create", durable=True) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                return
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("INSERT INTO run VALUES (1, ?, ?, ?, 0, 0, 0, 1, 1)", first_row)
            connection.execute("INSERT INTO epochs VALUES (0, NULL, NULL, 0)")
        self.fold_log()

    def _begin_log(self) -> None:
        """Switch to the write-ahead log. Here SQLite does not wait for others who do the same, so this does."""
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                self._connection().execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_LOG_POLL_S)

    @contextmanager
    def transaction(self, operation: str, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """One write transaction, alone among all processes; all of it or nothing.

        Args:
            operation: Named in fault points.
            durable: Survives power loss, not only the death of processes; costs an fsync.
        """
        with _translated(self.path):
            connection = self._connection()
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                reach("ledger.before_transaction", operation)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            reach("ledger.after_transaction", operation)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of all tables."""
        with _translated(self.path):
            connection = self._connection()
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def fold_log(self) -> None:
        """Move what the write-ahead log holds into the file itself, as far as nobody else is reading."""
        with _translated(self.path):
            self._connection().execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connections.close(connection)
            self._local.connection = None

    def now(self) -> float:
        """Seconds since this machine booted, sleep included: no user and no time server can set it."""
        return time.clock_gettime(_CLOCK)

    def boot_id(self) -> str:
        """Names this boot: deadlines of another boot mean nothing."""
        return _boot_id()

    def _connection(self) -> sqlite3.Connection:
        kept = getattr(self._local, "connection", None)
        if kept is not None and connections.is_open(kept):
            return kept
        options = "?immutable=1" if self._is_archived() else ""
        connection = connections.connect(self.path, options=options, timeout_s=_BUSY_TIMEOUT_S)
        self._local.connection = connection
        return connection

    def _is_archived(self) -> bool:
        """Whether the ledger lies where nobody writes it: SQLite would want to write there even to read it."""
        folder, log = self.path.absolute().parent, self.path.with_name(self.path.name + "-wal")
        return self.path.exists() and not os.access(folder, os.W_OK) and not log.exists()


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"booted-{int((time.time() - time.clock_gettime(_CLOCK)) // 60)}"


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "locked" in text or "busy" in text:
            raise LedgerError(
                f"{path} was locked by another process for {_BUSY_TIMEOUT_S:.0f} s: find that process and end it"
            ) from error
        raise LedgerError(f"{path} cannot be used: {text}: check the folder, its permissions and free space") from error
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            raise LedgerError(
                f"{path} is not a ledger: it is no SQLite file; move it away or name another run"
            ) from error
        raise LedgerError(f"{path} is damaged ({error}): restore it from a copy, or begin a new run") from error
    except OSError as error:
        raise LedgerError(f"{path} cannot be used: {error.strerror or error}") from error

"""The ledger for workers on many machines: a schema in PostgreSQL, time by the server's clock.

Structural changes (`change`) run one at a time, by an advisory lock that ends with its transaction. The frequent
statements run beside them and beside each other; they lock single rows, and every change locks the rows it is going to
write before it reads them.

A lost connection: the old server process is ended for certain, then the call is made again and finds out by its
request number whether it had been carried out. Transaction numbers would not do: after a crash PostgreSQL may hand one
out again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.errors import LedgerError, MissingExtraError
from penstock.faults import reach
from penstock.ledger import frequent
from penstock.ledger.database import Move, Result, Rows
from penstock.ledger.postgres_url import redacted, secrets, split_run
from penstock.ledger.schema import FIRST_ROWS, TABLES, VERSION

if TYPE_CHECKING:
    import psycopg

_CONNECT_S = 10
_RECONNECT_S = 60.0
_STATEMENT_S = 180
_POLL_S = (0.05, 1.0)
_MARK = "penstock ledger"
_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"
_RETRIED = frozenset({"40001", "40P01", "57P01", "57P02", "57P03"})
"""Serialization failure, deadlock, shutdown by an administrator, crash of another process, still starting."""


class PostgresTransaction:
    """Statements on one connection, between BEGIN and COMMIT."""

    locking = " FOR UPDATE"
    skipping = " FOR UPDATE SKIP LOCKED"

    def __init__(self, database: PostgresDatabase, connection: psycopg.Connection, *, again: bool, reads: bool) -> None:
        self._database = database
        self._connection = connection
        self.again = again
        if reads:
            self.locking = self.skipping = ""

    def execute(self, sql: str, values: Sequence[object] = (), /) -> Rows:
        return self._connection.execute(_in_psycopg(sql), values)  # pyright: ignore[reportArgumentType]

    def execute_many(self, sql: str, rows: Sequence[Sequence[object]], /) -> None:
        if not rows:
            return
        with self._connection.cursor() as cursor:
            cursor.executemany(_in_psycopg(sql), rows)  # pyright: ignore[reportArgumentType]

    def claim_open(self, session_id: int, count: int, request: int, /) -> list[Any]:
        return self._database.claim_on(self._connection, session_id, count, request)

    def now(self) -> float:
        return self.execute(f"SELECT {self._database.clock}").fetchone()[0]

    def wall_time(self) -> float:
        return self.now()

    def boot_id(self) -> str:
        return self._database.boot_id()


class PostgresDatabase:
    """Connections to one run's schema: one a thread, made on first use, never carried into another process."""

    restock_every = 128

    def __init__(self, url: str) -> None:
        self._url = url
        self._conninfo, run = split_run(url)
        self._schema = f"penstock_{run}"
        self._local = threading.local()
        self._looked = (-1, 0)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._url,)

    @property
    def url(self) -> str:
        return redacted(self._url)

    @property
    def clock(self) -> str:
        """The server's time as an expression."""
        return _NOW

    def boot_id(self) -> str:
        return ""  # the server's clock has one life

    # -- the schema ----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        found = self._attempt(self._look, patient=False)
        if found is None:
            return False
        mark, version = found
        if mark != _MARK:
            raise LedgerError(
                f"{self.url}: the schema {self._schema} is of another program: name another run, or another database"
            )
        if version != VERSION:
            raise LedgerError(
                f"{self.url} has schema version {version}, expected {VERSION}: "
                "it was written by another version of penstock; use that one for this run"
            )
        return True

    def _look(self, connection: psycopg.Connection, again: bool) -> tuple[str | None, int] | None:
        """The schema's mark and version; None where there is no schema."""
        found = connection.execute(
            "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s", (self._schema,)
        ).fetchone()
        if found is None:
            return None
        if found[0] is None or not found[0].startswith(_MARK):
            return found[0], 0
        return _MARK, int(found[0].rpartition(" ")[2])

    def create(self, identity: Sequence[object]) -> None:
        def create(connection: psycopg.Connection, again: bool) -> None:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (self._schema,))
                if self._look(connection, again) is not None:
                    return
                connection.execute(f'CREATE SCHEMA "{self._schema}"'.encode())
                connection.execute(f"COMMENT ON SCHEMA \"{self._schema}\" IS '{_MARK} {VERSION}'".encode())
                connection.execute(_tables().encode())
                connection.execute(_in_psycopg(FIRST_ROWS[0]), identity)  # pyright: ignore[reportArgumentType]
                connection.execute(FIRST_ROWS[1].encode())
                reach("ledger.before_transaction", "create")
            reach("ledger.after_transaction", "create")

        self._attempt(create)

    # -- transactions --------------------------------------------------------------------------------------------------

    def change(self, operation: str, body: Callable[[PostgresTransaction], Result], *, durable: bool = False) -> Result:
        def change(connection: psycopg.Connection, again: bool) -> Result:
            # Two statements in one message; the lock is had before anything is read.
            connection.execute(self._begin)
            result = body(PostgresTransaction(self, connection, again=again, reads=False))
            reach("ledger.before_transaction", operation)
            connection.execute(b"COMMIT")
            reach("ledger.after_transaction", operation)
            return result

        return self._attempt(change)

    @property
    def _begin(self) -> bytes:
        return f"BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('{self._schema}', 0))".encode()

    def read(self, body: Callable[[PostgresTransaction], Result]) -> Result:
        def read(connection: psycopg.Connection, again: bool) -> Result:
            connection.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            result = body(PostgresTransaction(self, connection, again=again, reads=True))
            connection.execute(b"COMMIT")
            return result

        return self._attempt(read)

    def claim_open(self, session_id: int, count: int, request: int) -> list[Any]:
        def claim(connection: psycopg.Connection, again: bool) -> list[Any]:
            if again:
                return []  # the long way looks for what the first try was given
            reach("ledger.before_transaction", "claim")
            found = self.claim_on(connection, session_id, count, request)
            if found:
                reach("ledger.after_transaction", "claim")
            return found

        return self._attempt(claim)

    def claim_on(self, connection: psycopg.Connection, session_id: int, count: int, request: int) -> list[Any]:
        values = (session_id, *self._looked, session_id, self.boot_id(), count, session_id, request)
        found = connection.execute(_timed(frequent.POSTGRES_CLAIM, self.clock), values, prepare=True).fetchall()
        if found:
            self._looked = found[0][8], max(row[2] for row in found) + 1
        return found

    def move_chunk(self, name: Move, values: Sequence[object]) -> bool:
        sql = f"{frequent.MOVE[name]} RETURNING 1"
        return bool(self._attempt(lambda connection, _: self._one(connection, name, sql, values)))

    def renew(self, session_id: int, timeout_s: float) -> float | None:
        sql, values = f"{frequent.RENEW} RETURNING deadline", (timeout_s, self.boot_id(), session_id)
        found = self._attempt(lambda connection, _: self._one(connection, "heartbeat", sql, values))
        return found[0][0] if found else None

    def _one(self, connection: psycopg.Connection, operation: str, sql: str, values: Sequence[object]) -> list[Any]:
        """One statement as a transaction of its own; what it returns of changed rows."""
        reach("ledger.before_transaction", operation)
        found = connection.execute(_timed(sql, self.clock), values, prepare=True).fetchall()
        if found:
            reach("ledger.after_transaction", operation)
        return found

    def new_request(self) -> int:
        return random.getrandbits(62) + 1

    # -- connections ---------------------------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[psycopg.Connection, bool], Result], *, patient: bool = True) -> Result:
        """Run `act`; where the connection is lost, connect again and run it again."""
        psycopg = _psycopg()
        again, deadline = False, 0.0
        while True:
            try:
                return act(self._connection(deadline), again)
            except psycopg.Error as error:
                lost = not self._roll_back()
                if not patient or not (lost or error.sqlstate in _RETRIED):
                    raise self._translated(error) from None
                again = True
                deadline = deadline or time.monotonic() + _RECONNECT_S
                if time.monotonic() > deadline:
                    raise self._translated(error) from None
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> bool:
        """Leave no transaction open; False where the connection is lost."""
        connection = getattr(self._local, "connection", None)
        if connection is None or connection.closed:
            return False
        if connection.info.transaction_status.name != "IDLE":
            connection.rollback()
        return not connection.closed

    def _connection(self, deadline: float = 0.0) -> psycopg.Connection:
        local = self._local
        if getattr(local, "pid", None) != os.getpid():
            # A forked process leaves its parent's connection alone: closing it would end it for the parent.
            local.pid, local.connection, local.backend, local.lost = os.getpid(), None, None, []
        if local.connection is not None and not local.connection.closed:
            return local.connection
        if local.connection is not None and local.backend is not None:
            local.lost.append(local.backend)
        local.connection = local.backend = None
        connection = self._connect(deadline)
        local.connection = connection
        local.backend = connection.execute(
            "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
        ).fetchone()
        while local.lost:
            self._end_backend(connection, local.lost[0])
            local.lost.pop(0)
        return connection

    def _connect(self, deadline: float) -> psycopg.Connection:
        psycopg = _psycopg()
        delay = _POLL_S[0]
        while True:
            try:
                return psycopg.connect(
                    self._conninfo,
                    autocommit=True,
                    connect_timeout=_CONNECT_S,
                    application_name="penstock",
                    options=f"-c search_path={self._schema} -c synchronous_commit=on "
                    f"-c statement_timeout={_STATEMENT_S * 1000} -c timezone=UTC -c plan_cache_mode=force_generic_plan",
                    keepalives_idle=10,
                    keepalives_interval=5,
                    keepalives_count=3,
                    tcp_user_timeout=30_000,
                )
            except psycopg.Error as error:
                if time.monotonic() + delay > deadline:
                    raise self._translated(error) from None
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(_POLL_S[1], delay * 2)

    @staticmethod
    def _end_backend(connection: psycopg.Connection, lost: tuple[int, object]) -> None:
        """See that the server process of a lost connection has ended: what it had in hand is done or will not be."""
        living, deadline = True, time.monotonic() + _RECONNECT_S
        while living:
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"the server process {lost[0]} of a lost connection did not end within {_RECONNECT_S:.0f} s, so "
                    "what it had in hand is not known: end it on the server, and resume the run"
                )
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s", lost
            )
            living = connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND backend_start = %s", lost
            ).fetchone()
            if living:
                time.sleep(_POLL_S[0])

    def close(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None and self._local.pid == os.getpid():
            connection.close()
            self._local.connection = self._local.backend = None

    def _translated(self, error: psycopg.Error) -> LedgerError:
        """The error in a sentence, without its cause: the cause could tell what must not be told."""
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in secrets(self._url):
            text = text.replace(secret, "***")
        advice = (
            "check that the server runs, can be reached, and lets this user in; the password may come from PGPASSWORD"
        )
        if error.sqlstate is not None and not error.sqlstate.startswith(("08", "28", "57P")):
            advice = "nothing was changed"
        return LedgerError(f"{self.url} cannot be used: {text}: {advice}")


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtraError(
            "a ledger in PostgreSQL needs psycopg: install it with `pip install 'psycopg[binary]>=3.2'`"
        ) from error
    return psycopg


@cache
def _in_psycopg(sql: str) -> bytes:
    """A statement with its places marked as psycopg has them."""
    return sql.replace("%", "%%").replace("?", "%s").encode()


@cache
def _timed(sql: str, clock: str) -> bytes:
    """A statement with the server's clock in its place."""
    return _in_psycopg(sql.replace("{now}", clock))


@cache
def _tables() -> str:
    """The tables in PostgreSQL's words. Rows of chunks leave room to be updated in place, and are soon swept away."""
    sql = TABLES.replace(" INTEGER", " BIGINT").replace(" REAL", " DOUBLE PRECISION")
    sql = sql.replace("session_id BIGINT PRIMARY KEY", "session_id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY")
    head, chunks, tail = sql.partition("CREATE TABLE chunks")
    busy = "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000"
    tail = tail.replace(") WITHOUT ROWID;", f") WITH ({busy});", 1)
    return (head + chunks + tail).replace(" WITHOUT ROWID", "")

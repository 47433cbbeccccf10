"""Ledgers on the stage: real files and a real server, and the test's clock instead of theirs."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import psycopg

from ledger.stage import IDENTITY, TIMEOUT_S, Catalog, Clock
from penstock.ledger import Ledger
from penstock.ledger.database import Database
from penstock.ledger.operations import SqlLedger
from penstock.ledger.postgres import PostgresDatabase
from penstock.ledger.postgres_url import split_run
from penstock.ledger.sqlite import SqliteDatabase
from penstock.ledger.supply import Supply
from penstock.plans import ClaimsPlan
from penstock.types import DatasetIdentity


class ClockedSqlite(SqliteDatabase):
    """A SQLite database that reads the stage's clock; pickled, it takes along the time it was pickled at."""

    def __init__(self, path: str, clock: Clock) -> None:
        super().__init__(path)
        self._clock = clock

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self.path), self._clock)

    def now(self) -> float:
        return self._clock.now

    def wall_time(self) -> float:
        return self._clock.now

    def boot_id(self) -> str:
        return self._clock.boot_id


class ClockedPostgres(PostgresDatabase):
    """A run in PostgreSQL that reads the stage's clock."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url)
        self._stage_clock = clock

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._url, self._stage_clock)

    @property
    def clock(self) -> str:
        return f"CAST({self._stage_clock.now!r} AS DOUBLE PRECISION)"

    def boot_id(self) -> str:
        return self._stage_clock.boot_id


class ClockedStage:
    """A stage over some database, without a word about which."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.catalog = Catalog()

    def database(self) -> Database:
        raise NotImplementedError

    def unopened(self, *, identity: DatasetIdentity | None = IDENTITY, database: Database | None = None) -> SqlLedger:
        """A ledger that has touched nothing yet."""
        return SqlLedger(
            database or self.database(),
            identity=identity,
            supply=Supply(ClaimsPlan(chunk_size=identity.chunk_size), self.catalog) if identity else None,
            session_timeout_s=TIMEOUT_S,
        )

    def open(self, *, identity: DatasetIdentity | None = IDENTITY) -> Ledger:
        ledger = self.unopened(identity=identity)
        ledger.open()
        return ledger


class SqliteStage(ClockedStage):
    """A stage whose store is one SQLite file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def database(self) -> Database:
        return ClockedSqlite(str(self.path), self.clock)


class PostgresStage(ClockedStage):
    """A stage whose store is a run of its own in a database that many tests share."""

    def __init__(self, server_url: str) -> None:
        super().__init__()
        self.url = f"{server_url}{'&' if '?' in server_url else '?'}run=stage_{uuid4().hex}"

    def database(self) -> Database:
        return ClockedPostgres(self.url, self.clock)

    def drop(self) -> None:
        """Drop the run, for the next one's speed."""
        conninfo, run = split_run(self.url)
        with psycopg.connect(conninfo) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS penstock_{run} CASCADE".encode())

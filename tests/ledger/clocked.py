"""SQLite ledgers on the stage: real files, and the test's clock instead of the machine's."""

from __future__ import annotations

from pathlib import Path

from ledger.stage import IDENTITY, TIMEOUT_S, Catalog, Clock
from penstock.ledger import Ledger
from penstock.ledger.operations import SqlLedger
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

    def boot_id(self) -> str:
        return self._clock.boot_id


class SqliteStage:
    """A stage whose store is one SQLite file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.catalog = Catalog()

    def unopened(
        self, *, identity: DatasetIdentity | None = IDENTITY, database: type[ClockedSqlite] = ClockedSqlite
    ) -> SqlLedger:
        """A ledger that has touched no file yet."""
        return SqlLedger(
            database(str(self.path), self.clock),
            identity=identity,
            supply=Supply(ClaimsPlan(chunk_size=identity.chunk_size), self.catalog) if identity else None,
            session_timeout_s=TIMEOUT_S,
        )

    def open(self, *, identity: DatasetIdentity | None = IDENTITY) -> Ledger:
        ledger = self.unopened(identity=identity)
        ledger.open()
        return ledger

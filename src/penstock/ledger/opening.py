"""From a path or URL to a ledger."""

from __future__ import annotations

import os

from penstock.errors import ConfigError
from penstock.ledger.base import BlockCatalog, Ledger
from penstock.ledger.database import Database
from penstock.ledger.operations import SqlLedger
from penstock.ledger.postgres_url import is_postgres, redacted
from penstock.ledger.sqlite import SqliteDatabase
from penstock.ledger.supply import Supply
from penstock.plans import ClaimsPlan
from penstock.types import DatasetIdentity


def open_database(url: str | os.PathLike[str]) -> Database:
    """The database of a path or URL, untouched yet."""
    text = os.fspath(url)
    if is_postgres(text):
        from penstock.ledger.postgres import PostgresDatabase

        return PostgresDatabase(text)
    if "://" in text:
        scheme = text.split("://", maxsplit=1)[0]
        raise ConfigError(
            f"ledger {scheme}:// is not supported: expected a path or postgresql://host/database?run=name"
        )
    return SqliteDatabase(text)


def without_secrets(url: str) -> str:
    """A path or URL as it may be told and saved."""
    return redacted(url) if is_postgres(url) else url


def has_ledger(url: str | os.PathLike[str]) -> bool:
    """Whether there is a ledger, and not merely the beginning of one whose creator was killed."""
    database = open_database(url)
    try:
        return database.exists()
    finally:
        database.close()


def open_ledger(
    url: str | os.PathLike[str],
    *,
    identity: DatasetIdentity | None = None,
    catalog: BlockCatalog | None = None,
    session_timeout_s: float = 60.0,
) -> Ledger:
    """Open a ledger, creating it where there is none.

    Args:
        url: A path: the embedded SQLite ledger. ``postgresql://host/database?run=name``: a run in that database.
        identity: The data set it must belong to; None to read an existing ledger, whatever it belongs to.
        catalog: Where blocks are looked up as chunks are claimed; needed to claim.
        session_timeout_s: How long a silent worker keeps its chunks.
    """
    if session_timeout_s <= 0:
        raise ConfigError(f"session_timeout_s={session_timeout_s} would fence every worker: expected more than 0")
    supply = Supply(ClaimsPlan(chunk_size=identity.chunk_size), catalog) if identity and catalog else None
    database = open_database(url)
    ledger = SqlLedger(database, identity=identity, supply=supply, session_timeout_s=session_timeout_s)
    ledger.open()
    return ledger

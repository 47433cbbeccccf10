"""SQLite connections of this process, and what becomes of them when it forks.

SQLite keeps a table of the locks a process holds. A forked child inherits the table and not the locks: it would believe
itself safe and write unprotected. So what this thread has open is closed before a fork and opened again on use; a file
that another thread has open at that moment is refused in the child. Nor may a ledger's file ever be opened by other
means than SQLite: closing any descriptor of it would drop all locks of the process on it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

from penstock.errors import LedgerError

_lock = threading.Lock()
_open: dict[sqlite3.Connection, tuple[int, Path]] = {}
_left_open_by_parent: dict[sqlite3.Connection, tuple[int, Path]] = {}


def connect(path: Path, *, options: str = "", timeout_s: float) -> sqlite3.Connection:
    """A connection for this thread alone."""
    place = path.absolute()
    if any(inherited == place for _, inherited in _left_open_by_parent.values()):
        raise LedgerError(
            f"{path} was in use when this process was forked, and SQLite's locks do not survive that: "
            "start processes by spawn instead of fork"
        )
    connection = sqlite3.connect(place.as_uri() + options, uri=True, timeout=timeout_s, isolation_level=None)
    with _lock:
        _open[connection] = (threading.get_ident(), place)
    return connection


def is_open(connection: sqlite3.Connection) -> bool:
    """Whether a connection is one of this process that nobody has closed."""
    return connection in _open


def close(connection: sqlite3.Connection) -> None:
    with _lock:
        _open.pop(connection, None)
    connection.close()


def _before_fork() -> None:
    for connection, (thread, _) in list(_open.items()):
        if thread == threading.get_ident() and not connection.in_transaction:
            close(connection)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _left_open_by_parent.update(_open)  # kept, because closing them would close the parent's files under it
    _open.clear()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)

"""What a ledger asks of its database: transactions that are wholly done or not done, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

Result = TypeVar("Result")
Move = Literal["record", "complete"]


class Rows(Protocol):
    """What a statement found."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Transaction(Protocol):
    """Statements that take effect together. Places are marked by ``?``."""

    again: bool
    """Whether this is another try after a lost connection: the first one may have been carried out."""
    locking: str
    """Stands behind a SELECT of rows that are about to be changed,"""
    skipping: str
    """or where those that others are changing are not wanted."""

    def execute(self, sql: str, values: Sequence[object] = (), /) -> Rows: ...

    def execute_many(self, sql: str, rows: Sequence[Sequence[object]], /) -> None:
        """One statement for many rows, in one go."""
        ...

    def claim_open(self, session_id: int, count: int, request: int, /) -> list[Any]:
        """As `Database.claim_open`, where somebody may have put chunks on record while this one waited for its turn."""
        ...

    def now(self) -> float:
        """Seconds on the ledger's clock."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, to tell people when something happened; nothing is decided by it."""
        ...

    def boot_id(self) -> str:
        """Names the clock's life: deadlines of another one mean nothing."""
        ...


class Database(Protocol):
    """One ledger's tables. Safe to share between threads, to pickle to spawned processes and to use after a fork.

    Exclusion: `change` runs alone among all processes, but for `claim_open`, `move_chunk` and `renew`, which lock the
    rows they touch. Durability: what any of these has returned from survives the death of any process.
    Failures: `LedgerError`.
    """

    restock_every: int
    """Whoever gets a chunk with a token divisible by this puts more chunks on record, so that nobody else has to wait
    for them; 0: whoever finds none does."""

    @property
    def url(self) -> str:
        """Where it is, to be told to people: holds no secret."""
        ...

    def exists(self) -> bool:
        """Whether there is a ledger; anything else in its place is refused, and left as it is."""
        ...

    def create(self, identity: Sequence[object]) -> None:
        """Make the tables and the first rows; nothing where another process was faster."""
        ...

    def change(self, operation: str, body: Callable[[Transaction], Result], *, durable: bool = False) -> Result:
        """Run `body` in one write transaction; all of it happens or nothing.

        Args:
            operation: Named in fault points.
            body: May be run again where the connection was lost, see `Transaction.again`.
            durable: Survives power loss too.
        """
        ...

    def read(self, body: Callable[[Transaction], Result]) -> Result:
        """Run `body` on one consistent view of all tables."""
        ...

    def claim_open(self, session_id: int, count: int, request: int) -> list[Any]:
        """Lease what is open, in one go, where nothing stands against it (see `frequent.py`).

        Returns:
            Epoch, block, chunk, samples, token, committed samples, committed offset and exclusions of each chunk.
        """
        ...

    def move_chunk(self, name: Move, values: Sequence[object]) -> bool:
        """Note progress of a chunk, in one go, where nothing stands against it."""
        ...

    def renew(self, session_id: int, timeout_s: float) -> float | None:
        """Move a session's deadline on; None where it has ended."""
        ...

    def new_request(self) -> int:
        """Names one call, so that it can be found again behind a lost connection; 0 where none can be lost."""
        ...

    def close(self) -> None:
        """Close this thread's connection; it opens again on use."""
        ...

"""Trying again: the one place that does it.

A backend says what kind of failure it met: `TransientStoreError` (429, 5xx, a cut connection, a time-out) is worth
another try, everything else is not. Waiting grows exponentially with jitter, follows the server's Retry-After where it
gave one, and is bounded by attempts and by a deadline.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TypeVar

from penstock.errors import ConfigError, TransientStoreError

_log = logging.getLogger(__name__)
_SAID_FROM_S = 5.0
"""Once so long was waited in all, it is told; less is nobody's business."""
PROGRESS_BYTES = 1 << 20
"""How much must have arrived after a failure for it to be forgotten."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """How long to go on trying."""

    attempts: int = 10
    deadline_s: float = 300.0
    """No try begins later than this after the first failure."""
    first_wait_s: float = 0.1
    longest_wait_s: float = 30.0
    """Cap of our own waits; a server may ask for more."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts} never tries: expected 1 or more")

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """How long to wait after so many failures in a row: half of it certain, half by chance, so that many
        clients do not come back at once; never less than the server asked for."""
        backoff = min(self.longest_wait_s, self.first_wait_s * 2 ** (failures - 1))
        chosen = backoff * (0.5 + 0.5 * random.random())
        return chosen if asked_s is None else asked_s + chosen * 0.1


METADATA = RetryBudget(attempts=9, deadline_s=600.0)
"""A server that is not there at all is given up in seconds; one that asks to wait is waited for."""
DATA = RetryBudget(attempts=14, deadline_s=900.0)
"""A download that took hours is worth a quarter of an hour of patience."""
WRITES = RetryBudget(attempts=12, deadline_s=600.0)
"""What is written was worked for: longer than metadata, though somebody may be waiting for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How long to go on trying, by what is tried: looking (head, list), reading, writing and deleting."""

    metadata: RetryBudget = METADATA
    data: RetryBudget = DATA
    writes: RetryBudget = WRITES


@dataclass(slots=True, kw_only=True)
class Patience:
    """One operation's failures so far. Progress in between gives the whole budget back: see `refresh`."""

    budget: RetryBudget
    what: str
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    began_at: float | None = None
    waited_s: float = 0.0
    arrived_bytes: int = 0

    def refresh(self, size_bytes: int) -> None:
        """Something arrived. Once that is enough to speak of, what failed before does not count any more: a server that
        breaks off after every few bytes is one that fails."""
        if self.failures:
            self.arrived_bytes += size_bytes
            if self.arrived_bytes >= PROGRESS_BYTES:
                self.failures, self.began_at, self.waited_s, self.arrived_bytes = 0, None, 0.0, 0

    def spend(self, error: TransientStoreError) -> None:
        """Wait before the next try, or raise where there is none left."""
        self.sleep(self.next_wait_s(error))

    def next_wait_s(self, error: TransientStoreError) -> float:
        """How long to wait before the next try; raises where there is none left."""
        now = self.clock()
        if self.began_at is None:
            self.began_at = now
        self.failures += 1
        wait_s = self.budget.wait_s(self.failures, error.retry_after_s)
        left_s = self.budget.deadline_s - (now - self.began_at)
        if self.failures >= self.budget.attempts or wait_s > left_s:
            waits = f", and the server asks to wait {error.retry_after_s:.0f} s" if error.retry_after_s else ""
            told = str(error).removeprefix(f"{self.what}: ")
            raise TransientStoreError(
                f"{self.what}: given up after {self.failures} tries in {now - self.began_at:.0f} s{waits}: {told}: "
                "run the same command again later",
                retry_after_s=error.retry_after_s,
            ) from error
        self.waited_s += wait_s
        if self.waited_s >= _SAID_FROM_S:
            _log.warning("%s: trying again in %.0f s", error, wait_s)
        return wait_s


def with_retries(operation: Callable[[], T], budget: RetryBudget, what: str) -> T:
    """Do something that may be done twice, until it succeeds or the budget is spent."""
    patience = Patience(budget=budget, what=what)
    while True:
        try:
            return operation()
        except TransientStoreError as error:
            patience.spend(error)


def parse_retry_after(value: str | None, now_s: float | None = None) -> float | None:
    """Seconds to wait by a Retry-After header: a number, or a date by the server's clock; None where unreadable."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - (time.time() if now_s is None else now_s))

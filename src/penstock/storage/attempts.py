"""One request to one endpoint, which may be given up while it is under way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import StorageError
from penstock.storage.client import ObjectClient
from penstock.storage.hedging import LEAST_BYTES, HedgeAllowance, Pace
from penstock.storage.partial import PartialRead
from penstock.storage.rotation import Endpoint

T = TypeVar("T")
Ask = Callable[[ObjectClient, PartialRead], T]


class Attempt(Generic[T]):
    """One request to one endpoint, in a lane. Reports to its race, unless that has given it up."""

    def __init__(self, endpoint: Endpoint, partial: PartialRead, *, reads: bool, paced: bool) -> None:
        """Remember whom to ask; `paced` says that it is one request, whose time tells what is usual."""
        self.endpoint = endpoint
        self.partial = partial
        self.result: T | None = None
        self.error: BaseException | None = None
        self.began_at = time.monotonic()
        self.looked_at = 0.0
        self.is_slow = False
        """Whether another was asked beside it."""
        self._reads = reads
        self._paced = paced
        self._had = partial.arrived
        self._lock = threading.Lock()
        self._is_done = False

    def run(self, ask: Ask[T], reports: queue.SimpleQueue[Attempt[T]], allowance: HedgeAllowance) -> None:
        try:
            self.result = ask(self.endpoint.client, self.partial)
            self._note_pace(time.monotonic())
        except StorageError as error:
            self.error = error.with_traceback(None)  # which would hold all that has arrived until it is collected
        except BaseException as error:  # noqa: BLE001 - raised by who asked
            self.error = error
        with self._lock:
            self._is_done = True
        if self.partial.is_abandoned:
            allowance.bury()
        else:
            reports.put(self)

    def give_up(self, allowance: HedgeAllowance) -> None:
        with self._lock:
            if not self._is_done:
                self.partial.is_abandoned = True
                allowance.abandon()

    @property
    def has_begun(self) -> bool:
        """Whether its answer has begun to arrive."""
        return self.partial.answered_at is not None

    @property
    def slow_at(self) -> float | None:
        """When it is slow; never, once bytes flow that would be lost."""
        answered_at = self.partial.answered_at
        if self.partial.arrived > self._had:
            return None
        if answered_at is None:
            pace: Pace = self.endpoint.answers if self._reads else self.endpoint.looks
            return max(self.looked_at, self.began_at + pace.slow_s())
        return max(self.looked_at, answered_at + self.endpoint.bodies.slow_s(self._mebibytes))

    @property
    def _mebibytes(self) -> float:
        return max(1.0, self.partial.awaited_bytes / LEAST_BYTES)

    def _note_pace(self, now: float) -> None:
        if not self._paced:
            return
        if not self._reads:
            self.endpoint.looks.note(now - self.began_at)
        elif self.partial.answered_at is not None:
            self.endpoint.answers.note(self.partial.answered_at - self.began_at)
            if not self.partial.is_abandoned:
                self.endpoint.bodies.note((now - self.partial.answered_at) / self._mebibytes)

"""One request's way to an answer, over several endpoints.

asked: next in turn ── answers ──────────────────────────────────► done; whoever else was asked is given up
            │ fails                       │ slow, and the allowance lets us
            ▼                             ▼
       the one after it, at once     the one after it, as well: the first answer wins
            │ all have failed
            ▼
       wait, and round again, until the budget is spent
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import AccessDenied, ObjectNotFound, PreconditionFailed, StorageError, TransientStoreError
from penstock.storage.attempts import Ask, Attempt
from penstock.storage.connection import refuse_after_fork
from penstock.storage.hedging import HedgeAllowance
from penstock.storage.lanes import Lanes
from penstock.storage.partial import ChangedWhileRead, PartialRead
from penstock.storage.retry import Patience, RetryBudget
from penstock.storage.rotation import Endpoint, Rotation

_log = logging.getLogger(__name__)
_MOST_UNDER_WAY = 3
_LOOK_S = 5.0
_ASK_AGAIN_S = 0.2
"""One that is slow is looked at so often where the allowance is spent."""

T = TypeVar("T")


class Race(Generic[T]):
    """One request over the endpoints of a rotation; used once, by one thread.

    The deadline counts from the beginning, or from the last time that much arrived. It holds also for endpoints that do
    not answer: what has not begun to arrive by then is given up. One that has is waited for, within its time-outs.
    """

    def __init__(
        self,
        rotation: Rotation,
        lanes: Lanes,
        allowance: HedgeAllowance,
        ask: Ask[T],
        budget: RetryBudget,
        *,
        key: str,
        what: str = "",
        partial: PartialRead | None = None,
        pin: Callable[[Endpoint], str | None] | None = None,
        hedged: bool = True,
    ) -> None:
        """Remember what to ask.

        Args:
            rotation: Whom.
            lanes: Where requests run.
            allowance: How many may be asked for twice.
            ask: The request.
            budget: How long to go on.
            key: The object that is asked for; empty for a list.
            what: What is listed.
            partial: Where what is read goes; None for a request that only looks.
            pin: The version that an endpoint is held to, where it is.
            hedged: Whether a slow one is asked for again elsewhere.
        """
        refuse_after_fork()  # before any lock or lane: those of the parent are not ours
        self._rotation = rotation
        self._lanes = lanes
        self._allowance = allowance
        self._ask: Ask[T] = ask
        self._key = key
        self._base = partial if partial is not None else PartialRead()
        self._reads = partial is not None
        self._pin = pin
        self._hedged = hedged
        self._answers: dict[Endpoint, StorageError] = {}
        self._upcoming: list[Endpoint] = []
        self._under_way: list[Attempt[T]] = []
        self._begun_again: set[Endpoint] = set()
        self._resume_at: float | None = None
        """When the next round begins, where it is waited for while something is under way."""
        self._is_spent = False
        """Whether the budget is, so that what is under way is the last."""
        self._reports: queue.SimpleQueue[Attempt[T]] = queue.SimpleQueue()
        self._what = key or what or "the list"
        what = f"{key or what or 'a list'} on {len(rotation.health())} endpoints"
        self._patience = Patience(budget=budget, what=what, sleep=rotation.pause, began_at=time.monotonic())

    def run(self) -> tuple[T, Endpoint]:
        """The first answer, and whose it is."""
        self._allowance.earn()
        self._upcoming = self._next_round()
        try:
            while True:
                self._go_on(time.monotonic())
                report = self._next_report()
                if report is not None:
                    self._under_way.remove(report)
                    if report.error is None:
                        return self._won(report)
                    self._lost(report, report.error)
        finally:
            for attempt in self._under_way:
                attempt.give_up(self._allowance)

    def _go_on(self, now: float) -> None:
        """Ask whoever is to be asked now; raise where nothing is left to hope for."""
        if now > self._over_at and (self._answers or self._under_way):  # a deadline of nothing is still one try
            if not any(attempt.has_begun for attempt in self._under_way):
                raise self._given_up(now)
            return
        waited_for = next((attempt for attempt in self._under_way if not attempt.is_slow), None)
        if waited_for is not None:
            if not self._is_to_be_hedged(waited_for, now):
                return
            waited_for.is_slow = True
            self._upcoming = self._upcoming or self._next_round()
        if not self._upcoming and not self._begin_round(now):
            return
        if self._upcoming:
            self._start(self._upcoming.pop(0))

    def _begin_round(self, now: float) -> bool:
        """Once all have failed: wait, and begin again. While something is under way that is not yet; says whether."""
        if self._under_way:
            if self._resume_at is None and not self._is_spent:
                try:
                    self._resume_at = now + self._patience.next_wait_s(TransientStoreError(self._told()))
                except TransientStoreError:
                    self._is_spent = True
            if self._resume_at is None or now < self._resume_at:
                return False
        else:
            self._refuse_for_good()
            if self._is_spent:
                raise self._given_up(now)
            if self._resume_at is None:
                self._patience.spend(TransientStoreError(self._told()))
            else:
                self._patience.sleep(max(0.0, self._resume_at - now))
        self._resume_at = None
        self._upcoming = self._next_round()
        return True

    def _next_round(self) -> list[Endpoint]:
        """The endpoints in turn, without those that asking again does not change; those under way last."""
        order = [
            endpoint
            for endpoint in self._rotation.next_order()
            if isinstance(self._answers.get(endpoint), TransientStoreError | None)
        ]
        busy = {attempt.endpoint for attempt in self._under_way}
        return sorted(order, key=lambda endpoint: endpoint in busy)

    def _start(self, endpoint: Endpoint) -> None:
        partial = self._base.branch(self._pin(endpoint) if self._pin is not None else None)
        attempt: Attempt[T] = Attempt(endpoint, partial, reads=self._reads, paced=self._hedged)
        ask, reports, allowance = self._ask, self._reports, self._allowance
        self._lanes.start(lambda: attempt.run(ask, reports, allowance))
        self._under_way.append(attempt)

    def _next_report(self) -> Attempt[T] | None:
        """What an attempt has to tell; None once it is time for something else."""
        now = time.monotonic()
        times = [now + _LOOK_S]
        if now <= self._over_at:  # else something is arriving, and nothing else is to be done
            times.append(self._over_at)
            times += [self._resume_at] if self._resume_at is not None else []
            slow = [attempt.slow_at for attempt in self._under_way if self._can_hedge and not attempt.is_slow]
            times += [at for at in slow if at is not None]
        try:
            return self._reports.get(timeout=max(0.0, min(times) - now))
        except queue.Empty:
            return None

    @property
    def _can_hedge(self) -> bool:
        return self._hedged and len(self._under_way) < _MOST_UNDER_WAY

    def _is_to_be_hedged(self, attempt: Attempt[T], now: float) -> bool:
        slow_at = attempt.slow_at
        if not self._can_hedge or slow_at is None or now < slow_at:
            return False
        if self._allowance.take():
            return True
        attempt.looked_at = now + _ASK_AGAIN_S
        return False

    def _won(self, report: Attempt[T]) -> tuple[T, Endpoint]:
        self._base.take_over(report.partial)
        for attempt in self._under_way:
            if attempt.is_slow and not attempt.has_begun and attempt.endpoint is not report.endpoint:
                silent_s = time.monotonic() - attempt.began_at
                self._rotation.note_failure(
                    attempt.endpoint,
                    TransientStoreError(f"{self._what}: no answer in {silent_s:.2f} s, and another one has answered"),
                )
        self._rotation.note_answer(report.endpoint, self._key)
        having = report.endpoint.name
        for endpoint, error in self._answers.items():
            if isinstance(error, ObjectNotFound):
                _log.warning("%s misses %s, which %s has: copy it there", endpoint.name, self._key, having)
        return report.result, report.endpoint  # pyright: ignore[reportReturnType] - an attempt without error has one

    def _lost(self, report: Attempt[T], error: BaseException) -> None:
        endpoint = report.endpoint
        if not isinstance(error, StorageError):
            raise error
        self._answers[endpoint] = error
        if isinstance(error, PreconditionFailed):
            self._rotation.note_answer(endpoint)
            raise PreconditionFailed(f"{endpoint.name}: {error}")
        if isinstance(error, ChangedWhileRead):  # it has answered; what came before was another's
            self._rotation.note_answer(endpoint)
            if endpoint not in self._begun_again:
                self._begun_again.add(endpoint)
                self._upcoming.insert(0, endpoint)
        elif isinstance(error, ObjectNotFound):
            self._rotation.note_answer(endpoint)  # an answer, if not the one hoped for
        else:
            self._rotation.note_failure(endpoint, error)
        self._patience.refresh(self._base.join(report.partial))
        if self._patience.began_at is None:
            self._patience.began_at = time.monotonic()

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def _over_at(self) -> float:
        return (self._patience.began_at or 0.0) + self._patience.budget.deadline_s

    def _given_up(self, now: float) -> StorageError:
        for attempt in self._under_way:
            silent = TransientStoreError(f"no answer yet after {now - attempt.began_at:.1f} s")
            self._answers.setdefault(attempt.endpoint, silent)
        try:
            self._refuse_for_good()
        except StorageError as error:
            return error
        tries, took_s = self._patience.failures + 1, now - (self._patience.began_at or now)
        return TransientStoreError(
            f"{self._patience.what}: given up after {tries} tries in {took_s:.0f} s: {self._told()}: run the same "
            "command again later"
        )

    def _refuse_for_good(self) -> None:
        """Raise where no further round can change anything: nobody is left whom it makes sense to ask again."""
        answers = self._answers.values()
        if any(isinstance(error, TransientStoreError) for error in answers):
            return
        kinds = {type(error) for error in answers}
        kind = kinds.pop() if len(kinds) == 1 else AccessDenied if AccessDenied in kinds else StorageError
        raise kind(f"{self._what} is on none of the endpoints: {self._told()}")

    def _told(self) -> str:
        named = enumerate(self._answers.items(), start=1)
        return "; ".join(f"[{number}] {endpoint.name}: {error}" for number, (endpoint, error) in named)

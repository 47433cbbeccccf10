"""Trying again: waits that grow within bounds, a server's word that is kept, an end to all patience."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import AccessDenied, ConfigError, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage.retry import (
    DATA,
    METADATA,
    PROGRESS_BYTES,
    WRITES,
    Patience,
    RetryBudget,
    parse_retry_after,
    with_retries,
)

QUICK = RetryBudget(attempts=4, first_wait_s=0.0001, longest_wait_s=0.001)


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def patience(self, budget: RetryBudget) -> Patience:
        return Patience(budget=budget, what="the file", sleep=self.sleep, clock=lambda: self.now)


def spend_until_given_up(patience: Patience, asked_s: float | None = None) -> TransientStoreError:
    try:
        while True:
            patience.spend(TransientStoreError("broken", retry_after_s=asked_s))
    except TransientStoreError as error:
        return error


def failing(*errors: Exception) -> tuple[Callable[[], str], list[int]]:
    """An operation that fails in these ways and then succeeds, and how often it was tried."""
    tried: list[int] = []

    def operation() -> str:
        tried.append(len(tried))
        if len(tried) <= len(errors):
            raise errors[len(tried) - 1]
        return "done"

    return operation, tried


# How long


def test_waits_double_up_to_the_longest() -> None:
    budget = RetryBudget(first_wait_s=1.0, longest_wait_s=20.0)
    for failures, longest in [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 16.0), (6, 20.0), (60, 20.0)]:
        waits = [budget.wait_s(failures, None) for _ in range(300)]
        assert longest / 2 <= min(waits) < longest * 0.6
        assert longest * 0.9 < max(waits) <= longest


def test_no_two_wait_alike() -> None:
    assert len({RetryBudget().wait_s(3, None) for _ in range(100)}) > 90
    assert len({RetryBudget().wait_s(3, 60.0) for _ in range(100)}) > 90


@given(failures=st.integers(1, 50), asked_s=st.floats(0, 3600))
def test_a_server_that_asks_to_wait_gets_no_less_and_little_more(failures: int, asked_s: float) -> None:
    budget = RetryBudget()
    assert asked_s <= budget.wait_s(failures, asked_s) <= asked_s + budget.longest_wait_s * 0.1


def test_a_budget_that_never_tries_is_refused() -> None:
    with pytest.raises(ConfigError, match="attempts=0"):
        RetryBudget(attempts=0)


# How often


@pytest.mark.parametrize("budget", [QUICK, METADATA, DATA, WRITES, RetryBudget(attempts=1)])
def test_it_is_given_up_after_so_many_tries(budget: RetryBudget) -> None:
    clock = Clock()
    error = spend_until_given_up(clock.patience(budget))
    assert len(clock.slept) == budget.attempts - 1
    assert f"the file: given up after {budget.attempts} tries in {sum(clock.slept):.0f} s: broken" in str(error)
    assert "run the same command again later" in str(error)


def test_it_is_given_up_at_the_deadline() -> None:
    clock = Clock()
    spend_until_given_up(clock.patience(RetryBudget(attempts=1000, deadline_s=100.0, longest_wait_s=10.0)))
    assert 80.0 < sum(clock.slept) <= 100.0


def test_tries_that_take_long_themselves_count_against_the_deadline() -> None:
    clock = Clock()
    patience = clock.patience(RetryBudget(attempts=1000, deadline_s=100.0))
    for _ in range(2):
        patience.spend(TransientStoreError("no answer"))
        clock.now += 60.0
    with pytest.raises(TransientStoreError, match=r"given up after 3 tries in 12[0-9] s"):
        patience.spend(TransientStoreError("no answer"))


def test_a_wait_that_would_end_behind_the_deadline_is_not_begun_and_told() -> None:
    clock = Clock()
    error = spend_until_given_up(clock.patience(RetryBudget(deadline_s=300.0)), asked_s=3600.0)
    assert clock.slept == []
    assert "given up after 1 tries in 0 s, and the server asks to wait 3600 s: broken" in str(error)
    assert error.retry_after_s == 3600.0


def test_what_arrives_in_between_gives_the_whole_budget_back() -> None:
    clock = Clock()
    patience = clock.patience(RetryBudget(attempts=3, deadline_s=50.0, first_wait_s=10.0))
    for _ in range(20):
        patience.spend(TransientStoreError("broken"))
        patience.refresh(PROGRESS_BYTES)
    assert all(wait <= 10.0 for wait in clock.slept), "the waits begin anew as well"
    assert sum(clock.slept) > 50.0
    spend_until_given_up(patience)
    assert len(clock.slept) == 22


def test_long_waits_are_told_and_short_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.WARNING):
        clock.patience(RetryBudget()).spend(TransientStoreError("broken"))
        assert caplog.text == ""
        clock.patience(RetryBudget()).spend(TransientStoreError("busy", retry_after_s=42.0))
        assert "busy: trying again in 4" in caplog.text
        many = clock.patience(RetryBudget(attempts=9, first_wait_s=2.0))
        for number in range(4):
            many.spend(TransientStoreError(f"broken {number}"))
    assert "broken 0" not in caplog.text
    assert "broken 3: trying again" in caplog.text  # short ones are told as well once they have become many


# What


def test_a_passing_failure_is_tried_again_until_it_passes() -> None:
    operation, tried = failing(*[TransientStoreError("broken")] * 3)
    assert with_retries(operation, QUICK, "it") == "done"
    assert len(tried) == 4


def test_a_failure_that_stays_is_told_with_its_cause() -> None:
    broken = [TransientStoreError(f"broken {number}") for number in range(9)]
    operation, tried = failing(*broken)
    with pytest.raises(TransientStoreError, match="it: given up after 4 tries in 0 s: broken 3: run") as caught:
        with_retries(operation, QUICK, "it")
    assert caught.value.__cause__ is broken[3]
    assert len(tried) == 4


@pytest.mark.parametrize("error", [StorageError("a"), AccessDenied("b"), ObjectNotFound("c"), ValueError("d")])
def test_any_other_failure_is_tried_once(error: Exception) -> None:
    operation, tried = failing(error)
    with pytest.raises(type(error)) as caught:
        with_retries(operation, QUICK, "it")
    assert caught.value is error
    assert len(tried) == 1


# Retry-After


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("nan", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 90.0),
        ("Wed, 21 Oct 2015 09:28:00 +0200", 90.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 90.0),
        ("Wed, 21 Oct 2015 07:26:00 GMT", 0.0),
        ("", None),
        (None, None),
        ("soon", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_a_server_says_how_long_in_seconds_or_by_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, now_s=1445412390.0) == seconds


@given(st.text(max_size=30))
def test_no_header_is_an_error(header: str) -> None:
    seconds = parse_retry_after(header)
    assert seconds is None or seconds >= 0

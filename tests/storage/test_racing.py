"""A slow request is overtaken at another endpoint; whatever fails on the way, the first good answer is taken."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import AccessDenied, ConfigError, ObjectNotFound, PreconditionFailed, TransientStoreError
from penstock.storage import hedging
from penstock.storage.base import ObjectInfo
from penstock.storage.client import ObjectClient
from penstock.storage.hedging import HedgeAllowance, Pace
from penstock.storage.lanes import Lanes
from penstock.storage.partial import ChangedWhileRead, PartialRead
from penstock.storage.racing import Race
from penstock.storage.retry import RetryBudget
from penstock.storage.rotation import Rotation

pytestmark = pytest.mark.alone

BUDGET = RetryBudget(attempts=50, deadline_s=60.0, first_wait_s=0.01, longest_wait_s=0.05)
Act = Callable[[PartialRead], str]


class Endpoint:
    """An endpoint that does as it is told, request after request; then it says its name."""

    def __init__(self, name: str, *acts: Act | Exception) -> None:
        self.name = name
        self.address = SimpleNamespace(told=name)
        self.acts: list[Act | Exception] = list(acts)
        self.asked = 0
        self.lock = threading.Lock()

    def head(self, _key: str) -> ObjectInfo:
        raise TransientStoreError(f"{self.name} is not probed here")

    def answer(self, partial: PartialRead) -> str:
        with self.lock:
            self.asked += 1
            act = self.acts.pop(0) if self.acts else None
        if isinstance(act, Exception):
            raise act
        return act(partial) if act is not None else self.name


class Stage:
    """Endpoints, and what is raced over them. `silent` is an act that does not end before `speak` is set."""

    def __init__(self) -> None:
        self.speak = threading.Event()
        self.lanes = Lanes(idle_s=0.05)
        self.allowance = HedgeAllowance()
        self.rotation: Rotation | None = None

    def silent(self, _partial: PartialRead) -> str:
        assert self.speak.wait(60)
        return "late"

    def refuses_late(self, error: Exception) -> Act:
        def act(_partial: PartialRead) -> str:
            assert self.speak.wait(60)
            raise error

        return act

    def race(self, *endpoints: Endpoint, budget: RetryBudget = BUDGET, **more: Any) -> str:
        if self.rotation is None:
            self.rotation = Rotation(cast(list[ObjectClient], list(endpoints)))

        def ask(client: ObjectClient, partial: PartialRead) -> str:
            return cast(Endpoint, client).answer(partial)

        return Race(self.rotation, self.lanes, self.allowance, ask, budget, key="thing", **more).run()[0]

    def in_background(self, *endpoints: Endpoint) -> Callable[[], str]:
        pool = ThreadPoolExecutor(1)
        racing = pool.submit(self.race, *endpoints)
        pool.shutdown(wait=False)
        return lambda: racing.result(60)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(hedging, "_UNKNOWN_S", 0.01)
    stage = Stage()
    yield stage
    stage.speak.set()
    wait_until(lambda: stage.lanes.count == 0)  # every thread ends
    assert stage.allowance.abandoned == 0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


# Overtaken


def test_a_silent_endpoint_is_overtaken(stage: Stage) -> None:
    silent, quick = Endpoint("silent", stage.silent), Endpoint("quick")
    assert stage.race(silent, quick) == "quick"
    assert (silent.asked, quick.asked) == (1, 1)
    assert stage.allowance.abandoned == 1
    assert stage.allowance.taken == 1


def test_two_silent_ones_are_overtaken_by_the_third(stage: Stage) -> None:
    endpoints = Endpoint("a", stage.silent), Endpoint("b", stage.silent), Endpoint("c")
    assert stage.race(*endpoints) == "c"


def test_the_only_endpoint_is_asked_again_while_it_is_silent(stage: Stage) -> None:
    only = Endpoint("only", stage.silent)
    assert stage.race(only) == "only"
    assert only.asked == 2
    assert stage.rotation is not None
    assert stage.rotation.health()[0].failures == 0, "nobody else was quicker"


def test_one_that_stays_silent_is_left_out(stage: Stage) -> None:
    silent, quick = Endpoint("silent", *[stage.silent] * 9), Endpoint("quick")
    for _ in range(12):
        assert stage.race(silent, quick) == "quick"
    assert silent.asked == 3
    assert stage.rotation is not None
    health = stage.rotation.health()[0]
    assert (health.is_in, health.failures) == (False, 3)
    assert "another one has answered" in health.last_failure


def test_a_slow_one_may_still_win(stage: Stage) -> None:
    def speaks(_partial: PartialRead) -> str:
        stage.speak.set()
        raise TransientStoreError("not me")

    busy = [TransientStoreError("busy")] * 99
    assert stage.race(Endpoint("slow", stage.silent, *busy), Endpoint("fails", speaks, *busy)) == "late"


def test_bytes_that_flow_are_not_given_up(stage: Stage) -> None:
    def flows(partial: PartialRead) -> str:
        partial.add(cast(Any, b"some"))
        partial.answered_at = time.monotonic()
        return stage.silent(partial)

    flowing, other = Endpoint("flowing", flows), Endpoint("other")
    partial = PartialRead(0, 8)
    with ThreadPoolExecutor(1) as pool:
        racing = pool.submit(stage.race, flowing, other, partial=partial)
        time.sleep(0.1)  # many times what is slow here
        assert other.asked == 0
        stage.speak.set()
        assert racing.result(60) == "late"
    assert partial.joined() == b"some"


def test_an_allowance_that_is_spent_lets_nobody_be_asked_twice(stage: Stage) -> None:
    while stage.allowance.take():
        pass
    slow, other = Endpoint("slow", stage.silent), Endpoint("other")
    answer = stage.in_background(slow, other)
    wait_until(lambda: slow.asked == 1)
    time.sleep(0.1)
    assert other.asked == 0
    stage.speak.set()
    assert answer() == "late"


def test_a_list_is_not_asked_for_twice(stage: Stage) -> None:
    slow, other = Endpoint("slow", stage.silent), Endpoint("other")
    with ThreadPoolExecutor(1) as pool:
        racing = pool.submit(stage.race, slow, other, hedged=False)
        time.sleep(0.1)
        assert other.asked == 0
        stage.speak.set()
        assert racing.result(60) == "late"


def test_an_answer_nobody_waits_for_is_not_read() -> None:
    partial = PartialRead()

    def get(_path: str, **_more: Any) -> Any:
        partial.is_abandoned = True
        return object()  # of which anything that is read is an error

    class Client(ObjectClient):
        def _store(self, use: Any = None) -> Any:
            return SimpleNamespace(get=get)

    address = SimpleNamespace(url="s3://b", path=lambda key: key, scheme="s3", endpoint=None)
    Client(cast(Any, address), cast(Any, None)).read_on("thing", partial)
    assert partial.arrived == 0
    assert partial.answered_at is not None, "how long it took is known all the same"


# Failing beside a slow one


def test_when_everybody_else_fails_the_slow_one_is_waited_for(stage: Stage) -> None:
    slow = Endpoint("slow", stage.silent, *[TransientStoreError("busy")] * 99)
    others = [Endpoint(name, *[TransientStoreError("busy")] * 99) for name in "ab"]
    answer = stage.in_background(slow, *others)
    wait_until(lambda: all(other.asked >= 3 for other in others))
    stage.speak.set()
    assert answer() == "late"


def test_what_the_overtaker_misses_is_not_missing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    slow, misses = Endpoint("slow", stage.silent), Endpoint("misses", ObjectNotFound("not here"))
    with caplog.at_level(logging.WARNING):
        answer = stage.in_background(slow, misses)
        wait_until(lambda: misses.asked == 1)
        stage.speak.set()
        assert answer() in ("late", "slow"), "it may have been asked again meanwhile"
    assert "misses misses thing, which slow has" in caplog.text


def test_what_a_slow_one_misses_too_is_missing(stage: Stage) -> None:
    absent = ObjectNotFound("not here")
    slow = Endpoint("slow", stage.refuses_late(absent), *[absent] * 9)
    answer = stage.in_background(slow, other := Endpoint("other", absent))
    wait_until(lambda: other.asked == 1)
    stage.speak.set()
    with pytest.raises(ObjectNotFound, match=r"\[2\]"):
        answer()
    assert other.asked == 1


def test_an_overtaker_that_refuses_is_asked_once_and_told(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    slow, refuses = Endpoint("slow", stage.silent), Endpoint("refuses", AccessDenied("the key is wrong"))
    with caplog.at_level(logging.ERROR):
        answer = stage.in_background(slow, refuses)
        wait_until(lambda: refuses.asked == 1)
        wait_until(lambda: "left out until it is mended: the key is wrong" in caplog.text)
        stage.speak.set()
        assert answer() in ("late", "slow")
    assert refuses.asked == 1


def test_an_object_that_was_written_again_is_told_at_once(stage: Stage) -> None:
    changed = Endpoint("changed", PreconditionFailed("another version"))
    other = Endpoint("other")
    with pytest.raises(PreconditionFailed, match="changed: another version"):
        stage.race(changed, other)
    assert other.asked == 0
    assert stage.rotation is not None
    assert all(health.is_in and not health.failures for health in stage.rotation.health())


def test_what_is_not_the_stores_fault_is_raised_as_it_is(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="no key"):
        stage.race(Endpoint("a", ConfigError("no key")), Endpoint("b"))


def test_an_endpoint_with_another_version_begins_again_and_is_not_blamed(stage: Stage) -> None:
    def half(partial: PartialRead) -> str:
        partial.info = ObjectInfo("thing", 8, "one")
        partial.add(cast(Any, b"half"))
        raise TransientStoreError("broke off")

    def other_version(partial: PartialRead) -> str:
        assert partial.version == "one"
        partial.begin_again()
        raise ChangedWhileRead("another")

    def whole(partial: PartialRead) -> str:
        assert partial.arrived == 0
        partial.info = ObjectInfo("thing", 8, "two")
        partial.add(cast(Any, b"whole"))
        return "b"

    partial = PartialRead()
    assert stage.race(Endpoint("a", half), Endpoint("b", other_version, whole), partial=partial) == "b"
    assert partial.joined() == b"whole"
    assert stage.rotation is not None
    assert [health.failures for health in stage.rotation.health()] == [1, 0]


def test_who_waits_goes_on_as_soon_as_an_endpoint_is_back(stage: Stage) -> None:
    endpoint = Endpoint("only", *[TransientStoreError("gone")] * 4)
    hour = RetryBudget(attempts=9, deadline_s=7200.0, first_wait_s=3600.0, longest_wait_s=3600.0)
    with ThreadPoolExecutor(1) as pool:
        for failures in range(1, 4):  # which take it out
            with pytest.raises(TransientStoreError):
                stage.race(endpoint, budget=RetryBudget(attempts=1))
            assert endpoint.asked == failures
        waiting = pool.submit(stage.race, endpoint, budget=hour)
        wait_until(lambda: endpoint.asked == 4)
        while not waiting.done():  # until after it has begun to wait
            assert stage.rotation is not None
            with stage.rotation._lock:
                stage.rotation._endpoints[0].is_in = False
            stage.race(endpoint)
        assert waiting.result(60) == "only"


# The end


def test_silence_everywhere_is_an_error_at_the_deadline_that_names_all(stage: Stage) -> None:
    budget = RetryBudget(attempts=1000, deadline_s=0.3, first_wait_s=0.01, longest_wait_s=0.05)
    silent = [Endpoint(name, *[stage.silent] * 99) for name in ("first", "second")]
    with pytest.raises(TransientStoreError, match="given up") as caught:
        stage.race(*silent, budget=budget)
    assert not stage.speak.is_set(), "nobody has answered yet"
    for name in ("first", "second"):
        assert f"{name}: no answer yet" in str(caught.value)


def test_a_budget_that_is_spent_leaves_the_slow_one_its_chance(stage: Stage) -> None:
    budget = RetryBudget(attempts=2, deadline_s=60.0, first_wait_s=0.001, longest_wait_s=0.001)
    slow, fails = Endpoint("slow", stage.silent), Endpoint("fails", *[TransientStoreError("busy")] * 99)
    slow.acts += [TransientStoreError("busy")] * 99
    with ThreadPoolExecutor(1) as pool:
        racing = pool.submit(stage.race, slow, fails, budget=budget)
        wait_until(lambda: fails.asked + slow.asked >= 3)
        stage.speak.set()
        assert racing.result(60) == "late"


def test_many_threads_get_each_its_own(stage: Stage) -> None:
    busy = [TransientStoreError("busy")] * 9
    endpoints = [Endpoint(name, *[stage.silent] * 2, *busy) for name in "ab"] + [Endpoint("c", *busy)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: stage.race(*endpoints), range(300)))
    assert set(answers) <= {"a", "b", "c"}
    assert len(answers) == 300


# How slow is slow, and how often


def test_slow_is_twice_what_is_usual() -> None:
    pace = Pace()
    assert pace.slow_s() == hedging._UNKNOWN_S
    for _ in range(98):
        pace.note(0.4)
    pace.note(9.0)
    pace.note(9.0)
    assert pace.slow_s() == pytest.approx(0.8), "a few that stalled do not make stalling usual"
    assert pace.slow_s(3.0) == pytest.approx(2.4)
    for _ in range(64):
        pace.note(2.0)
    assert pace.slow_s() == pytest.approx(4.0), "what became slower for good is usual by then"
    for _ in range(64):
        pace.note(0.001)
    assert pace.slow_s() == hedging._SHORTEST_S


def test_a_tenth_of_the_requests_may_be_asked_for_twice() -> None:
    allowance = HedgeAllowance()
    at_once = 0
    while allowance.take():
        at_once += 1
    assert at_once == 10
    granted = 0
    for _ in range(1000):
        allowance.earn()
        granted += allowance.take()
    assert 99 <= granted <= 101


def test_nothing_is_asked_twice_while_many_are_under_way_for_nobody() -> None:
    allowance = HedgeAllowance()
    for _ in range(16):
        allowance.abandon()
    assert not allowance.take()
    allowance.bury()
    assert allowance.take()


# Lanes


def test_lanes_are_used_again_and_end_when_idle() -> None:
    lanes = Lanes(idle_s=0.2)
    ran: list[int] = []
    for number in range(20):
        done = threading.Event()

        def job(number: int = number, done: threading.Event = done) -> None:
            ran.append(number)
            done.set()

        lanes.start(job)
        assert done.wait(30)
    assert ran == list(range(20))
    wait_until(lambda: lanes.count == 0)
    again = threading.Event()
    lanes.start(again.set)
    assert again.wait(30), "and begin anew"


def test_as_many_jobs_run_at_once_as_there_are() -> None:
    lanes = Lanes(idle_s=0.05)
    together = threading.Barrier(17)
    for _ in range(16):
        lanes.start(lambda: (together.wait(30), None)[1])
    together.wait(30)
    wait_until(lambda: lanes.count == 0)

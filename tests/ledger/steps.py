"""Steps: numbered once, counted when committed, and never more than the limit over all sessions together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ledger.stage import TIMEOUT_S, Stage, claim, join, whole
from penstock.ledger import Ledger, Progress, Session


class StepBehaviour:
    def test_steps_are_numbered_from_one_over_all_sessions(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        assert [ledger.take_step(session, None) for session in (one, two, two, one)] == [1, 2, 3, 4]

    def test_the_limit_is_shared_by_all_sessions(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        assert [ledger.take_step(session, 3) for session in (one, two, one, two, one)] == [1, 2, 3, None, None]
        assert ledger.take_step(one, 4) == 4

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_below_one_allows_no_step(self, ledger: Ledger, limit: int) -> None:
        assert ledger.take_step(join(ledger), limit) is None

    def test_committed_steps_count_towards_the_limit(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        assert _take(ledger, session, 2, limit=3) == [1, 2]
        ledger.complete(lease, whole(lease, steps=2))
        assert ledger.commit("a", "digest", [session.session_id]).total_steps == 2
        assert _take(ledger, session, 2, limit=3) == [3, None]

    @pytest.mark.parametrize("end", ["fenced", "left"])
    def test_a_lost_sessions_steps_can_be_taken_again(self, ledger: Ledger, stage: Stage, end: str) -> None:
        lost, other = join(ledger, "lost"), join(ledger, "other")
        assert _take(ledger, lost, 2, limit=3) == [1, 2]
        assert _take(ledger, other, 2, limit=3) == [3, None]
        if end == "left":
            ledger.leave(lost)
        else:
            stage.clock.now += TIMEOUT_S
            ledger.heartbeat(other)
            assert ledger.fence_silent() == [lost.session_id]
        assert _take(ledger, other, 3, limit=3) == [4, 5, None]

    def test_a_step_taken_and_not_recorded_stays_reserved_over_a_commit(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        assert _take(ledger, session, 2, limit=3) == [1, 2]
        ledger.record(lease, Progress(samples=1, offset=1, steps=1))
        assert ledger.commit("a", "digest", [session.session_id]).total_steps == 1
        assert _take(ledger, session, 2, limit=3) == [3, None]

    def test_the_steps_of_sessions_that_do_not_contribute_stay_reserved_over_a_commit(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        lease = claim(ledger, one)[0]
        assert _take(ledger, one, 1, limit=3) == [1]
        assert _take(ledger, two, 1, limit=3) == [2]
        ledger.complete(lease, whole(lease))
        ledger.commit("a", "digest", [one.session_id])
        assert _take(ledger, one, 2, limit=3) == [3, None]

    def test_after_a_restore_steps_go_on_behind_the_commit(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        _take(ledger, session, 2, limit=None)
        ledger.complete(lease, whole(lease, steps=2))
        commit = ledger.commit("a", "digest", [session.session_id])
        assert commit.next_step == 3
        _take(ledger, session, 5, limit=None)
        ledger.restore("a")
        assert ledger.status().total_steps == 2
        assert _take(ledger, join(ledger), 3, limit=4) == [3, 4, None]

    def test_no_number_is_given_twice_in_a_generation_though_sessions_die(self, ledger: Ledger) -> None:
        taken: list[int | None] = []
        for index in range(4):
            session = join(ledger, f"worker {index}")
            taken += _take(ledger, session, 3, limit=3)
            ledger.leave(session)
        assert taken == list(range(1, 13))

    def test_the_limit_is_exact_when_many_threads_take_steps_at_once(self, ledger: Ledger) -> None:
        sessions = [join(ledger, f"worker {index}") for index in range(6)]

        def take_all(session: Session) -> list[int]:
            taken: list[int] = []
            while (step := ledger.take_step(session, 50)) is not None:
                taken.append(step)
            ledger.close()
            return taken

        with ThreadPoolExecutor(len(sessions)) as pool:
            taken = [step for steps in pool.map(take_all, sessions) for step in steps]
        assert sorted(taken) == list(range(1, 51))


def _take(ledger: Ledger, session: Session, count: int, *, limit: int | None) -> list[int | None]:
    return [ledger.take_step(session, limit) for _ in range(count)]

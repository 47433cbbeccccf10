"""Sessions: the living keep their chunks, the silent and the departed lose all that no commit holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ledger.stage import CHUNKS, TIMEOUT_S, Stage, claim, join, learn, refused, seen, whole
from penstock.errors import LeaseLost
from penstock.ledger import Lease, Ledger, Progress, Session, Wait

ACTIONS: dict[str, Callable[[Ledger, Session, Lease], object]] = {
    "record": lambda ledger, _, lease: ledger.record(lease, Progress(samples=1, offset=1, steps=1)),
    "complete": lambda ledger, _, lease: ledger.complete(lease, whole(lease)),
    "heartbeat": lambda ledger, session, _: ledger.heartbeat(session),
    "claim": lambda ledger, session, _: ledger.claim(session),
    "take_step": lambda ledger, session, _: ledger.take_step(session, None),
    "commit": lambda ledger, session, _: ledger.commit("late", "digest", [session.session_id]),
}


class FencingBehaviour:
    def test_a_dead_workers_chunk_comes_back_at_its_deadline_and_not_before(self, ledger: Ledger, stage: Stage) -> None:
        claim(ledger, join(ledger, "dead"), 5)
        session = join(ledger)
        stage.clock.now += TIMEOUT_S - 0.001
        assert isinstance(refused(ledger, session), Wait)
        stage.clock.now += 0.001
        assert [lease.ref for lease in claim(ledger, session)] == CHUNKS[:1]

    def test_a_slow_worker_keeps_its_chunk_while_its_heartbeats_come(self, ledger: Ledger, stage: Stage) -> None:
        slow, other = join(ledger, "slow"), join(ledger, "other")
        lease = claim(ledger, slow, 5)[0]
        for _ in range(10):
            stage.clock.now += TIMEOUT_S * 0.9
            assert ledger.heartbeat(slow) == stage.clock.now + TIMEOUT_S
            ledger.heartbeat(other)
            assert isinstance(refused(ledger, other), Wait)
        ledger.complete(lease, whole(lease))

    def test_a_worker_that_was_late_and_not_yet_fenced_lives_on(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        stage.clock.now += TIMEOUT_S * 3
        assert [lease.ref for lease in claim(ledger, session)] == CHUNKS[1:2]
        ledger.heartbeat(session)
        assert ledger.fence_silent() == []
        ledger.complete(lease, whole(lease))

    def test_a_clock_that_goes_backwards_fences_nobody(self, ledger: Ledger, stage: Stage) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        claim(ledger, one, 5)
        stage.clock.now -= 10 * TIMEOUT_S
        assert ledger.fence_silent() == []
        wait = refused(ledger, two)
        assert isinstance(wait, Wait)
        assert wait.delay_s > 0

    def test_fencing_the_silent_names_them_once(self, ledger: Ledger, stage: Stage) -> None:
        silent = [join(ledger, "one"), join(ledger, "two")]
        stage.clock.now += TIMEOUT_S / 2
        join(ledger, "three")
        stage.clock.now += TIMEOUT_S / 2
        assert ledger.fence_silent() == [session.session_id for session in silent]
        assert ledger.fence_silent() == []

    def test_a_worker_that_leaves_gives_its_chunks_back_at_once(self, ledger: Ledger) -> None:
        leaving, staying = join(ledger, "leaving"), join(ledger, "staying")
        claim(ledger, leaving, 5)
        ledger.leave(leaving)
        assert [lease.ref for lease in claim(ledger, staying, 5)] == CHUNKS

    def test_leaving_twice_or_after_being_fenced_changes_nothing(self, ledger: Ledger, stage: Stage) -> None:
        leaving, fenced, staying = join(ledger, "leaving"), join(ledger, "fenced"), join(ledger, "staying")
        claim(ledger, leaving)
        claim(ledger, fenced)
        ledger.leave(leaving)
        stage.clock.now += TIMEOUT_S
        ledger.heartbeat(staying)
        ledger.fence_silent()
        claim(ledger, staying, 2)
        before = seen(ledger)
        ledger.leave(leaving)
        ledger.leave(fenced)
        assert seen(ledger) == before

    @pytest.mark.parametrize("end", ["fenced", "left"])
    def test_who_loses_its_session_loses_all_it_has_not_committed(self, ledger: Ledger, stage: Stage, end: str) -> None:
        lost, other = join(ledger, "lost"), join(ledger, "other")
        learn(ledger, lost)
        ledger.commit("a", "digest", [lost.session_id])
        learn(ledger, lost, 2)
        part = claim(ledger, lost)[0]
        ledger.record(part, Progress(samples=1, offset=1, steps=1))
        _end(ledger, stage, lost, end)
        assert ledger.pending() == []
        reopened = claim(ledger, other, 5)
        assert [lease.ref for lease in reopened] == CHUNKS[1:]
        assert {(lease.start, lease.start_offset) for lease in reopened} == {(0, 0)}

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("end", ["fenced", "left", "restored"])
    def test_a_lost_session_can_do_nothing_more(self, ledger: Ledger, stage: Stage, end: str, action: str) -> None:
        lost = join(ledger, "lost")
        lease = claim(ledger, lost)[0]
        _end(ledger, stage, lost, end)
        before = seen(ledger)
        with pytest.raises(LeaseLost, match=r"lost was fenced|no longer held"):
            ACTIONS[action](ledger, lost, lease)
        assert seen(ledger) == before

    @pytest.mark.parametrize("action", ["record", "complete"])
    def test_a_lost_session_is_told_so_of_a_chunk_it_had_committed(
        self, ledger: Ledger, stage: Stage, action: str
    ) -> None:
        lost = join(ledger, "lost")
        lease = learn(ledger, lost)[0]
        ledger.commit("a", "digest", [lost.session_id])
        _end(ledger, stage, lost, "fenced")
        with pytest.raises(LeaseLost):
            ACTIONS[action](ledger, lost, lease)

    def test_a_robbed_worker_cannot_complete_for_the_new_holder(self, ledger: Ledger, stage: Stage) -> None:
        robbed, holder = join(ledger, "robbed"), join(ledger, "holder")
        old = claim(ledger, robbed)[0]
        stage.clock.now += TIMEOUT_S
        ledger.heartbeat(holder)
        new = claim(ledger, holder)[0]
        assert new.ref == old.ref
        assert new.token > old.token
        with pytest.raises(LeaseLost):
            ledger.complete(old, whole(old))
        ledger.complete(new, whole(new))
        assert [work.session_id for work in ledger.pending()] == [holder.session_id]

    def test_a_worker_that_comes_back_is_somebody_else(self, ledger: Ledger) -> None:
        first = join(ledger, "worker")
        ledger.leave(first)
        second = join(ledger, "worker")
        assert second.session_id != first.session_id
        claim(ledger, second)
        with pytest.raises(LeaseLost):
            ledger.claim(first)

    @pytest.mark.parametrize("action", ["heartbeat", "claim", "take_step", "commit"])
    def test_a_session_that_never_joined_is_refused(self, ledger: Ledger, action: str) -> None:
        stranger = Session(session_id=77, worker="stranger", generation=0)
        with pytest.raises(LeaseLost):
            ACTIONS[action](ledger, stranger, claim(ledger, join(ledger))[0])

    # -- generations ---------------------------------------------------------------------------------------------------

    def test_a_new_generation_fences_all_sessions_of_the_old_one(self, ledger: Ledger) -> None:
        sessions = [join(ledger, "one"), join(ledger, "two")]
        assert ledger.restore(None) == 1
        for session in sessions:
            with pytest.raises(LeaseLost):
                ledger.heartbeat(session)
        assert {worker.state for worker in ledger.status().workers} == {"fenced"}

    @pytest.mark.parametrize("generation", [0, 2])
    def test_only_workers_of_the_current_generation_can_join(self, ledger: Ledger, generation: int) -> None:
        current = ledger.restore(None)
        with pytest.raises(LeaseLost, match=f"worker belongs to generation {generation} .* is in generation {current}"):
            ledger.join("worker", generation=generation)
        assert ledger.status().workers == []
        assert ledger.join("worker", generation=current).generation == current


def _end(ledger: Ledger, stage: Stage, session: Session, how: str) -> None:
    """End one session in one of the ways in which sessions end; all others live on."""
    if how == "left":
        ledger.leave(session)
    elif how == "restored":
        ledger.restore(None)
    else:
        stage.clock.now += TIMEOUT_S
        for worker in ledger.status().workers:
            if worker.session_id != session.session_id:
                ledger.heartbeat(Session(session_id=worker.session_id, worker=worker.worker, generation=0))
        assert ledger.fence_silent() == [session.session_id]

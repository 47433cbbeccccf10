"""Commits: what the named sessions have trained, all of it, bound to one checkpoint or not at all."""

from __future__ import annotations

import pytest

from ledger.stage import CHUNKS, TIMEOUT_S, Stage, audit, claim, join, learn, learn_all, seen
from penstock.errors import LeaseLost, LedgerError
from penstock.ledger import Commit, Contribution, Ledger, Progress


class CommitBehaviour:
    def test_a_commit_binds_all_that_the_named_sessions_have_trained_and_no_more(self, ledger: Ledger) -> None:
        one, two, three = join(ledger, "one"), join(ledger, "two"), join(ledger, "three")
        learn(ledger, one, 2)
        learn(ledger, two)
        ledger.record(claim(ledger, three)[0], Progress(samples=1, offset=1, steps=1))
        commit = ledger.commit("a", "digest", [three.session_id, one.session_id])
        bound = [(span.ref, span.session, span.start, span.stop) for span in ledger.spans(0)]
        assert bound == [
            (CHUNKS[0], one.session_id, 0, 2),
            (CHUNKS[1], one.session_id, 0, 2),
            (CHUNKS[3], three.session_id, 0, 1),
        ]
        assert {span.commit for span in ledger.spans(0)} == {commit.seq}
        assert [work.worker for work in ledger.pending()] == ["two"]

    def test_a_commit_tells_what_it_holds_and_when_it_was_made(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        learn(ledger, session, 2)
        first = ledger.commit("a", "sha256:1", [session.session_id])
        learn(ledger, session)
        second = ledger.commit("b", "sha256:2", [session.session_id])
        now = stage.clock.now
        assert first == Commit(
            seq=1, checkpoint_id="a", digest="sha256:1", epoch=0, total_steps=2, next_step=3, committed_at=now
        )
        assert second == Commit(
            seq=2, checkpoint_id="b", digest="sha256:2", epoch=0, total_steps=3, next_step=4, committed_at=now
        )
        assert ledger.commits() == [first, second]
        assert ledger.last_commit() == second

    def test_a_commit_of_nobody_holds_nothing_and_counts(self, ledger: Ledger) -> None:
        assert ledger.last_commit() is None
        commit = ledger.commit("start", "digest", [])
        assert ledger.last_commit() == commit
        assert (commit.total_steps, commit.next_step) == (0, 1)
        assert list(ledger.spans(0)) == []

    def test_a_session_named_twice_contributes_once(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session)
        assert ledger.commit("a", "digest", [session.session_id] * 3).total_steps == 1
        assert audit(ledger).once == 2

    @pytest.mark.parametrize("end", ["fenced", "left", "unknown"])
    def test_a_commit_with_a_lost_session_is_refused_and_nothing_is_bound(
        self, ledger: Ledger, stage: Stage, end: str
    ) -> None:
        lives, lost = join(ledger, "lives"), join(ledger, "lost")
        learn(ledger, lives)
        learn(ledger, lost)
        if end == "fenced":
            stage.clock.now += TIMEOUT_S
            ledger.heartbeat(lives)
            ledger.fence_silent()
        elif end == "left":
            ledger.leave(lost)
        lost_id = lost.session_id if end != "unknown" else 77
        before = seen(ledger)
        with pytest.raises(LeaseLost, match="lost was fenced" if end != "unknown" else "session 77 was fenced"):
            ledger.commit("a", "digest", [lives.session_id, lost_id])
        assert seen(ledger) == before
        ledger.commit("a", "digest", [lives.session_id])

    def test_a_checkpoint_is_committed_once(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        learn(ledger, session)
        before = seen(ledger)
        with pytest.raises(LedgerError, match="checkpoint a is committed already: expected a new id"):
            ledger.commit("a", "digest", [session.session_id])
        assert seen(ledger) == before

    def test_a_committed_chunk_is_never_handed_out_again_in_its_epoch(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session, 2)
        ledger.commit("a", "digest", [session.session_id])
        ledger.leave(session)
        assert [lease.ref for lease in claim(ledger, join(ledger), 5)] == CHUNKS[2:]

    def test_a_finished_epoch_has_learned_every_sample_once(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        learn(ledger, one, 2)
        learn_all(ledger, two)
        ledger.commit("a", "digest", [one.session_id])
        assert audit(ledger).missing == 5
        ledger.commit("b", "digest", [two.session_id])
        done = audit(ledger)
        assert done.holds
        assert done.by_session == {one.session_id: 4, two.session_id: 5}

    # -- pending -------------------------------------------------------------------------------------------------------

    def test_pending_is_what_the_living_have_trained_and_no_commit_holds(self, ledger: Ledger) -> None:
        one, two, idle = join(ledger, "one"), join(ledger, "two"), join(ledger, "idle")
        left = join(ledger, "left")
        learn(ledger, one, 2)
        learn(ledger, left)
        ledger.record(claim(ledger, two)[0], Progress(samples=1, offset=4, steps=3))
        claim(ledger, idle)
        ledger.leave(left)
        assert ledger.pending() == [
            Contribution(session_id=one.session_id, worker="one", samples=4, steps=2, chunks=2),
            Contribution(session_id=two.session_id, worker="two", samples=1, steps=3, chunks=1),
        ]
        ledger.commit("a", "digest", [one.session_id, two.session_id])
        assert ledger.pending() == []

    def test_pending_counts_a_partly_committed_chunk_from_its_commit(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        ledger.record(lease, Progress(samples=1, offset=1, steps=4))
        ledger.commit("a", "digest", [session.session_id])
        ledger.complete(lease, Progress(samples=2, offset=2, steps=1))
        [work] = ledger.pending()
        assert (work.samples, work.steps) == (1, 1)

    # -- status --------------------------------------------------------------------------------------------------------

    def test_the_status_tells_where_the_run_stands(self, ledger: Ledger) -> None:
        generation = ledger.restore(None)
        one, two = ledger.join("one", generation=generation, pid=41), ledger.join("two", generation=generation, pid=42)
        part = claim(ledger, one)[0]
        ledger.record(part, Progress(samples=1, offset=1, steps=1))
        ledger.commit("a", "digest", [one.session_id])
        ledger.complete(part, Progress(samples=2, offset=2, steps=1))
        commit = ledger.commit("b", "digest", [one.session_id])
        learn(ledger, one)
        claim(ledger, two, 2)
        ledger.leave(two)
        claim(ledger, one)
        status = ledger.status()
        assert (status.dataset_id, status.block_size, status.chunk_size) == ("letters", 5, 2)
        assert (status.generation, status.epoch, status.total_steps) == (1, 0, 2)
        assert status.chunks == {"open": 1, "leased": 1, "trained": 1, "committed": 1, "excluded": 0}
        assert (status.samples_committed, status.blocks_seen, status.last_commit) == (2, 2, commit)
        told = [(w.worker, w.pid, w.state, w.chunks_committed, w.samples_committed) for w in status.workers]
        assert told == [("one", 41, "active", 1, 2), ("two", 42, "ended", 0, 0)]

    def test_the_status_of_a_run_that_has_not_begun_is_empty(self, ledger: Ledger) -> None:
        status = ledger.status()
        assert set(status.chunks.values()) == {0}
        assert (status.samples_committed, status.blocks_seen, status.last_commit, status.workers) == (0, 0, None, [])

"""Restoring: the ledger goes back to exactly what a checkpoint has learned, and only when it is asked to."""

from __future__ import annotations

import pytest

from ledger.stage import CHUNKS, Stage, audit, claim, join, learn, learn_all, refused, seen, whole
from penstock.errors import LedgerError
from penstock.ledger import EpochDone, Ledger, Progress


class RestoreBehaviour:
    def test_opening_rolls_nothing_back(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        learn(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        learn(ledger, session)
        lease = claim(ledger, session)[0]
        before = seen(ledger)
        again = stage.open()
        assert seen(again) == before
        again.complete(lease, whole(lease))
        ledger.heartbeat(session)
        assert ledger.pending()[0].chunks == 2

    def test_a_closed_ledger_opens_again_on_use(self, ledger: Ledger) -> None:
        lease = claim(ledger, join(ledger))[0]
        ledger.close()
        ledger.close()
        ledger.complete(lease, whole(lease))

    def test_the_last_commit_is_kept_and_what_came_after_it_forgotten(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session, 2)
        commit = ledger.commit("a", "digest", [session.session_id])
        learn(ledger, session)
        claim(ledger, session)
        ledger.restore("a")
        assert ledger.pending() == []
        assert ledger.last_commit() == commit
        assert ledger.status().samples_committed == 4
        assert [lease.ref for lease in claim(ledger, join(ledger), 5)] == CHUNKS[2:]

    def test_an_earlier_commit_undoes_the_later_ones_on_the_same_chunk(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        ledger.record(lease, Progress(samples=0, offset=3, steps=3))
        first = ledger.commit("a", "digest", [session.session_id])
        ledger.record(lease, Progress(samples=1, offset=5, steps=2))
        ledger.commit("b", "digest", [session.session_id])
        ledger.complete(lease, Progress(samples=2, offset=8, steps=4))
        ledger.commit("c", "digest", [session.session_id])
        learn(ledger, session)
        ledger.commit("d", "digest", [session.session_id])
        ledger.restore("a")
        assert ledger.commits() == [first]
        assert (ledger.status().total_steps, ledger.status().samples_committed) == (3, 0)
        assert audit(ledger).once == 0
        leases = claim(ledger, join(ledger), 5)
        assert [lease.ref for lease in leases] == CHUNKS
        assert [(lease.start, lease.start_offset) for lease in leases] == [(0, 3)] + [(0, 0)] * 4

    def test_a_commit_in_the_middle_is_restored_in_the_middle(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        ledger.record(lease, Progress(samples=1, offset=5, steps=2))
        ledger.commit("a", "digest", [session.session_id])
        ledger.complete(lease, Progress(samples=2, offset=8, steps=4))
        ledger.commit("b", "digest", [session.session_id])
        ledger.restore("a")
        lease = claim(ledger, join(ledger))[0]
        assert (lease.ref, lease.start, lease.start_offset) == (CHUNKS[0], 1, 5)
        assert audit(ledger).once == 1

    def test_an_earlier_epoch_comes_back_as_it_was(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session, 2)
        ledger.commit("middle", "digest", [session.session_id])
        learn_all(ledger, session)
        ledger.commit("end", "digest", [session.session_id])
        ledger.advance_epoch(0)
        learn(ledger, session, 3)
        ledger.commit("next", "digest", [session.session_id])
        ledger.restore("middle")
        assert (ledger.status().epoch, ledger.status().samples_committed) == (0, 4)
        assert list(ledger.spans(1)) == []
        session = join(ledger)
        assert [lease.ref for lease in learn(ledger, session, 5)] == CHUNKS[2:]
        ledger.commit("end", "digest", [session.session_id])
        assert audit(ledger).holds
        assert ledger.advance_epoch(0) == 1
        assert [lease.ref for lease in claim(ledger, session, 5)] == CHUNKS

    def test_the_end_of_an_epoch_is_restored_as_its_end(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("end", "digest", [session.session_id])
        ledger.advance_epoch(0)
        learn(ledger, session)
        ledger.restore("end")
        session = join(ledger)
        assert refused(ledger, session) == EpochDone(epoch=0)
        assert ledger.advance_epoch(0) == 1
        assert [lease.ref for lease in claim(ledger, session, 5)] == CHUNKS

    def test_a_commit_of_the_current_epoch_keeps_the_epochs_before_it(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("end", "digest", [session.session_id])
        ledger.advance_epoch(0)
        learn(ledger, session)
        ledger.commit("next", "digest", [session.session_id])
        learn(ledger, session)
        ledger.restore("next")
        assert ledger.status().epoch == 1
        assert audit(ledger, 0).holds
        assert audit(ledger, 1).once == 2
        assert [lease.ref for lease in claim(ledger, join(ledger), 5)] == CHUNKS[1:]

    def test_the_beginning_is_before_every_commit(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("end", "digest", [session.session_id])
        ledger.advance_epoch(0)
        learn(ledger, session)
        ledger.commit("next", "digest", [session.session_id])
        ledger.restore(None)
        status = ledger.status()
        assert (status.epoch, status.total_steps, status.samples_committed, status.last_commit) == (0, 0, 0, None)
        assert list(ledger.spans(0)) == list(ledger.spans(1)) == []
        session = join(ledger)
        assert ledger.take_step(session, None) == 1
        assert [lease.ref for lease in claim(ledger, session, 9)] == CHUNKS

    def test_an_unknown_checkpoint_is_refused_and_nothing_changes(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        learn(ledger, session)
        before = seen(ledger)
        with pytest.raises(LedgerError, match="no commit of checkpoint b: nothing was changed"):
            ledger.restore("b")
        assert seen(ledger) == before
        ledger.heartbeat(session)

    def test_a_commit_that_was_undone_is_gone_and_its_name_free(self, ledger: Ledger) -> None:
        session = join(ledger)
        ledger.commit("a", "digest", [])
        learn(ledger, session)
        ledger.commit("b", "old", [session.session_id])
        ledger.restore("a")
        with pytest.raises(LedgerError, match="no commit of checkpoint b"):
            ledger.restore("b")
        assert ledger.commit("b", "new", []).digest == "new"

    def test_each_restore_starts_a_generation(self, ledger: Ledger) -> None:
        ledger.commit("a", "digest", [])
        assert [ledger.restore("a"), ledger.restore(None), ledger.restore(None)] == [1, 2, 3]
        assert ledger.status().generation == 3

"""Jobs that follow a loader: a commit holds its state, and a restore goes back to it."""

from __future__ import annotations

import pytest

from ledger.stage import Stage, claim, join, learn
from penstock.errors import LeaseLost, LedgerError
from penstock.ledger import Ledger, LoaderProgress


def progress(epoch: int = 0, steps: int = 2, samples: int = 4, state: str = '{"step": 2}') -> LoaderProgress:
    return LoaderProgress(epoch=epoch, steps=steps, samples=samples, exclusions=0, state=state)


class LoaderBehaviour:
    def test_a_commit_holds_the_loaders_state_and_counts_its_steps(self, ledger: Ledger) -> None:
        session = join(ledger)
        first = ledger.commit("a", "digest", [session.session_id], loader=progress())
        second = ledger.commit("b", "digest", [session.session_id], loader=progress(steps=3, samples=5, state="{}"))
        assert [(commit.total_steps, commit.next_step) for commit in (first, second)] == [(2, 3), (5, 6)]
        spans = ledger.loader_spans()
        assert [(span.commit, span.session, span.steps, span.state) for span in spans] == [
            (first.seq, session.session_id, 2, '{"step": 2}'),
            (second.seq, session.session_id, 3, "{}"),
        ]
        assert ledger.loader_spans(last=1) == spans[1:]
        assert ledger.status().samples_committed == 9

    def test_a_loader_goes_into_the_next_epoch_with_its_commit(self, ledger: Ledger) -> None:
        session = join(ledger)
        ledger.commit("a", "digest", [session.session_id], loader=progress(samples=9))
        assert ledger.commit("b", "digest", [session.session_id], loader=progress(epoch=1, samples=3)).epoch == 1
        status = ledger.status()
        assert (status.epoch, status.samples_committed) == (1, 3)

    @pytest.mark.parametrize("epoch", [2, -1])
    def test_a_loader_in_another_epoch_is_refused(self, ledger: Ledger, epoch: int) -> None:
        session = join(ledger)
        with pytest.raises(LedgerError, match=f"the loader is in epoch {epoch}, the run in 0"):
            ledger.commit("a", "digest", [session.session_id], loader=progress(epoch=epoch))
        assert ledger.last_commit() is None
        assert ledger.loader_spans() == []

    def test_a_restore_takes_later_states_back(self, ledger: Ledger) -> None:
        session = join(ledger)
        ledger.commit("a", "digest", [session.session_id], loader=progress(samples=4, state="first"))
        ledger.commit("b", "digest", [session.session_id], loader=progress(samples=5))
        ledger.commit("c", "digest", [session.session_id], loader=progress(epoch=1, samples=1))
        ledger.restore("a")
        assert [span.state for span in ledger.loader_spans()] == ["first"]
        status = ledger.status()
        assert (status.epoch, status.total_steps, status.samples_committed) == (0, 2, 4)
        ledger.restore(None)
        assert ledger.loader_spans() == []
        assert ledger.status().samples_committed == 0

    def test_a_lost_session_commits_no_state(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        ledger.restore(None)
        with pytest.raises(LeaseLost):
            ledger.commit("a", "digest", [session.session_id], loader=progress())
        assert stage.open().loader_spans() == []

    def test_a_state_belongs_to_one_session(self, ledger: Ledger) -> None:
        sessions = [join(ledger).session_id, join(ledger).session_id]
        with pytest.raises(LedgerError, match="belongs to one session: got 2"):
            ledger.commit("a", "digest", sessions, loader=progress())

    def test_claims_have_no_states(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        assert claim(ledger, session)
        assert ledger.loader_spans() == []

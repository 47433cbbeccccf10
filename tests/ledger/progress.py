"""Progress inside a chunk: told as often as one likes, only forwards, and resumed where its commit left it."""

from __future__ import annotations

import pytest

from ledger.stage import CHUNKS, Stage, audit, claim, join, learn_all, seen, whole
from penstock.errors import LeaseLost, LedgerError
from penstock.ledger import Contribution, Ledger, Progress


class ProgressBehaviour:
    def test_completing_twice_counts_once(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        for _ in range(3):
            ledger.complete(lease, whole(lease))
        [work] = ledger.pending()
        assert work == Contribution(session_id=session.session_id, worker="worker", samples=2, steps=1, chunks=1)
        ledger.commit("a", "digest", [session.session_id])
        ledger.complete(lease, whole(lease))
        assert ledger.pending() == []
        assert ledger.commit("b", "digest", [session.session_id]).total_steps == 1
        assert audit(ledger).once == 2

    def test_recording_twice_counts_once(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        for _ in range(3):
            ledger.record(lease, Progress(samples=1, offset=1, steps=1))
        assert ledger.commit("a", "digest", [session.session_id]).total_steps == 1
        ledger.record(lease, Progress(samples=1, offset=1, steps=1))
        assert ledger.pending() == []
        assert ledger.commit("b", "digest", [session.session_id]).total_steps == 1
        assert audit(ledger).once == 1

    @pytest.mark.parametrize("samples", [0, 1, 3])
    def test_a_chunk_is_complete_with_all_its_samples_only(self, ledger: Ledger, samples: int) -> None:
        lease = claim(ledger, join(ledger))[0]
        with pytest.raises(LedgerError, match=f"chunk 0 of block 0 .*completed with {samples} samples, expected all 2"):
            ledger.complete(lease, Progress(samples=samples, offset=2, steps=1))

    @pytest.mark.parametrize(
        "progress",
        [
            Progress(samples=3, offset=9, steps=1),
            Progress(samples=-1, offset=9, steps=1),
            Progress(samples=0, offset=9, steps=1),
            Progress(samples=1, offset=3, steps=1),
            Progress(samples=2, offset=9, steps=-1),
        ],
        ids=["more than the chunk", "less than nothing", "fewer samples", "smaller offset", "negative steps"],
    )
    def test_impossible_progress_is_refused_and_changes_nothing(self, ledger: Ledger, progress: Progress) -> None:
        lease = claim(ledger, join(ledger))[0]
        ledger.record(lease, Progress(samples=1, offset=4, steps=1))
        before = seen(ledger)
        with pytest.raises(LedgerError, match="is impossible") as refusal:
            ledger.record(lease, progress)
        assert not isinstance(refusal.value, LeaseLost)
        assert seen(ledger) == before

    def test_progress_behind_its_commit_is_refused(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        ledger.record(lease, Progress(samples=1, offset=1, steps=1))
        ledger.commit("a", "digest", [session.session_id])
        with pytest.raises(LedgerError, match="expected 1 to 2"):
            ledger.record(lease, Progress(samples=0, offset=1, steps=1))

    def test_recording_into_a_complete_chunk_is_refused_though_its_holder_lives(self, ledger: Ledger) -> None:
        lease = claim(ledger, join(ledger))[0]
        ledger.complete(lease, whole(lease))
        with pytest.raises(LedgerError, match="is trained: it is complete") as refusal:
            ledger.record(lease, Progress(samples=1, offset=1, steps=1))
        assert not isinstance(refusal.value, LeaseLost)

    def test_a_lease_under_another_token_is_no_lease(self, ledger: Ledger) -> None:
        session = join(ledger)
        first = claim(ledger, session)[0]
        ledger.leave(session)
        second = claim(ledger, join(ledger, "next"))[0]
        with pytest.raises(LeaseLost):
            ledger.record(first, Progress(samples=1, offset=1, steps=1))
        ledger.record(second, Progress(samples=1, offset=1, steps=1))

    # -- parts of chunks -----------------------------------------------------------------------------------------------

    def test_a_committed_part_is_resumed_behind_it_by_somebody_else(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        ledger.record(claim(ledger, one)[0], Progress(samples=1, offset=7, steps=3))
        ledger.commit("a", "digest", [one.session_id])
        ledger.leave(one)
        lease = claim(ledger, two)[0]
        assert (lease.ref, lease.start, lease.start_offset) == (CHUNKS[0], 1, 7)
        ledger.complete(lease, Progress(samples=2, offset=9, steps=1))
        ledger.commit("b", "digest", [two.session_id])
        told = [(span.start, span.stop, span.start_offset, span.stop_offset, span.steps) for span in ledger.spans(0)]
        assert told == [(0, 1, 0, 7, 3), (1, 2, 7, 9, 1)]
        assert [span.session for span in ledger.spans(0)] == [one.session_id, two.session_id]

    def test_a_part_that_no_commit_holds_is_learned_again(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        ledger.record(claim(ledger, one)[0], Progress(samples=1, offset=7, steps=3))
        ledger.leave(one)
        lease = claim(ledger, two)[0]
        assert (lease.ref, lease.start, lease.start_offset) == (CHUNKS[0], 0, 0)
        assert ledger.pending() == []
        ledger.commit("a", "digest", [two.session_id])
        assert audit(ledger).once == 0
        ledger.record(lease, Progress(samples=0, offset=1, steps=1))

    def test_its_holder_goes_on_behind_a_committed_part_under_the_same_lease(self, ledger: Ledger) -> None:
        session = join(ledger)
        lease = claim(ledger, session)[0]
        ledger.record(lease, Progress(samples=1, offset=7, steps=3))
        ledger.commit("a", "digest", [session.session_id])
        ledger.complete(lease, Progress(samples=2, offset=9, steps=2))
        assert ledger.commit("b", "digest", [session.session_id]).total_steps == 5
        learn_all(ledger, session)
        ledger.commit("c", "digest", [session.session_id])
        assert audit(ledger).holds

    def test_progress_within_one_long_sample_is_committed_and_resumed(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        ledger.record(claim(ledger, one)[0], Progress(samples=0, offset=5, steps=5))
        [work] = ledger.pending()
        assert (work.samples, work.steps, work.chunks) == (0, 5, 1)
        assert ledger.commit("a", "digest", [one.session_id]).total_steps == 5
        ledger.leave(one)
        lease = claim(ledger, two)[0]
        assert (lease.start, lease.start_offset) == (0, 5)
        assert audit(ledger).missing == 9

    def test_a_chunk_of_any_size_keeps_its_place(self, stage: Stage) -> None:
        stage.catalog.sizes = [2]
        ledger = stage.open()
        one = join(ledger, "one")
        ledger.record(claim(ledger, one)[0], Progress(samples=1, offset=2**62, steps=2**40))
        assert ledger.commit("a", "digest", [one.session_id]).total_steps == 2**40
        ledger.leave(one)
        assert claim(ledger, join(ledger, "two"))[0].start_offset == 2**62

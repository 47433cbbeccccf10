"""What the user wants first, last or not at all: priorities and skip ranges."""

from __future__ import annotations

import math

import pytest

from ledger.stage import CHUNKS, Stage, audit, claim, join, learn, learn_all, refused, seen, whole
from penstock.errors import LedgerError
from penstock.ledger import EpochDone, Ledger, Progress, SkipRange
from penstock.types import ChunkRef


class ChoosingBehaviour:
    # -- priorities ----------------------------------------------------------------------------------------------------

    def test_chunks_go_by_priority_then_in_plan_order(self, ledger: Ledger) -> None:
        ledger.prioritise({CHUNKS[3]: 1.0, CHUNKS[4]: 2.5, CHUNKS[0]: -1.0})
        order = [CHUNKS[4], CHUNKS[3], CHUNKS[1], CHUNKS[2], CHUNKS[0]]
        session = join(ledger)
        assert [claim(ledger, session)[0].ref for _ in order] == order

    def test_a_priority_counts_at_once_in_the_middle_of_an_epoch(self, ledger: Ledger) -> None:
        session = join(ledger)
        claim(ledger, session)
        ledger.prioritise({CHUNKS[4]: 1.0})
        assert [lease.ref for lease in claim(ledger, session, 9)] == [CHUNKS[4], *CHUNKS[1:4]]

    def test_a_chunk_that_came_back_waits_for_those_of_higher_priority(self, ledger: Ledger) -> None:
        gone, session = join(ledger, "gone"), join(ledger)
        claim(ledger, gone)
        ledger.prioritise({CHUNKS[3]: 1.0})
        ledger.leave(gone)
        assert [lease.ref for lease in claim(ledger, session, 2)] == [CHUNKS[3], CHUNKS[0]]

    def test_a_priority_holds_in_the_next_epoch_and_after_a_restore(self, ledger: Ledger) -> None:
        ledger.prioritise({CHUNKS[4]: 1.0})
        ledger.restore(None)
        session = join(ledger)
        assert learn(ledger, session)[0].ref == CHUNKS[4]
        learn_all(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        ledger.advance_epoch(0)
        assert claim(ledger, session)[0].ref == CHUNKS[4]

    def test_a_priority_that_is_taken_back_loses_no_chunk(self, ledger: Ledger) -> None:
        session = join(ledger)
        ledger.prioritise({CHUNKS[2]: -1.0, CHUNKS[1]: 1.0})
        claim(ledger, session, 3)
        ledger.prioritise({CHUNKS[2]: 0.0, CHUNKS[1]: 0.0})
        assert sorted(lease.ref for lease in claim(ledger, session, 9)) == [CHUNKS[2], CHUNKS[4]]

    @pytest.mark.parametrize("ref", [ChunkRef(0, 3), ChunkRef(2, 0), ChunkRef(0, -1)])
    def test_a_chunk_that_does_not_exist_cannot_be_prioritised(self, ledger: Ledger, ref: ChunkRef) -> None:
        before = seen(ledger)
        with pytest.raises(LedgerError, match="there is no chunk"):
            ledger.prioritise({CHUNKS[0]: 1.0, ref: 1.0})
        assert seen(ledger) == before

    def test_a_priority_that_is_no_number_is_refused(self, ledger: Ledger) -> None:
        for priority in (math.nan, math.inf):
            with pytest.raises(LedgerError, match="cannot be compared"):
                ledger.prioritise({CHUNKS[0]: priority})

    # -- skip ranges ---------------------------------------------------------------------------------------------------

    def test_a_lease_says_which_of_its_samples_are_excluded(self, ledger: Ledger) -> None:
        ledger.exclude([SkipRange(block_id=0, start=1, stop=2), SkipRange(block_id=1, start=3)], "noise")
        leases = claim(ledger, join(ledger), 9)
        assert [lease.ref for lease in leases] == CHUNKS
        assert [lease.excluded for lease in leases] == [((1, 2),), (), (), (), ((1, 2),)]

    def test_a_chunk_that_is_wholly_excluded_is_not_handed_out(self, ledger: Ledger) -> None:
        session = join(ledger)
        claim(ledger, session)
        ledger.exclude([SkipRange(block_id=0, start=2, stop=4), SkipRange(block_id=1)], "noise")
        assert [lease.ref for lease in claim(ledger, session, 9)] == [CHUNKS[2]]

    def test_an_epoch_ends_without_what_is_excluded_and_the_audit_counts_it(self, ledger: Ledger) -> None:
        ledger.exclude([SkipRange(block_id=0, start=1, stop=3), SkipRange(block_id=1)], "noise")
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        assert refused(ledger, session) == EpochDone(epoch=0)
        found = audit(ledger)
        assert found.holds
        assert (found.once, found.excluded, found.missing) == (3, 6, 0)

    def test_a_chunk_that_is_begun_is_finished_as_it_was_begun(self, ledger: Ledger) -> None:
        gone, session = join(ledger, "gone"), join(ledger)
        lease = claim(ledger, gone)[0]
        ledger.record(lease, Progress(samples=1, offset=1, steps=1))
        ledger.commit("a", "digest", [gone.session_id])
        ledger.exclude([SkipRange(block_id=0)], "noise")
        ledger.leave(gone)
        again = claim(ledger, session)[0]
        assert (again.ref, again.start, again.excluded) == (CHUNKS[0], 1, ())

    def test_a_chunk_in_hand_is_passed_over_once_it_comes_back(self, ledger: Ledger) -> None:
        gone, session = join(ledger, "gone"), join(ledger)
        claim(ledger, gone)
        ledger.exclude([SkipRange(block_id=0)], "noise")
        ledger.leave(gone)
        assert [lease.ref for lease in claim(ledger, session, 9)] == CHUNKS[3:]
        assert ledger.status().chunks["excluded"] >= 1

    def test_an_exclusion_says_since_when_and_why_and_survives_a_restore(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        learn(ledger, session, 2)
        ledger.commit("a", "digest", [session.session_id])
        learn(ledger, session)
        made = ledger.exclude([SkipRange(block_id=1, start=0, stop=2)], "noise")
        assert [(entry.epoch, entry.step, entry.reason) for entry in made] == [(0, 4, "noise")]
        assert made[0].excluded_at == stage.clock.now
        ledger.restore("a")
        kept = stage.open().exclusions()
        assert [(entry.epoch, entry.step, entry.block_id, entry.start, entry.stop) for entry in kept] == [
            (0, 3, 1, 0, 2)
        ]

    def test_what_an_earlier_epoch_learned_stays_learned_in_its_audit(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        ledger.advance_epoch(0)
        ledger.exclude([SkipRange(block_id=0)], "noise")
        learn_all(ledger, session)
        ledger.commit("b", "digest", [session.session_id])
        assert (audit(ledger, 0).once, audit(ledger, 0).excluded) == (9, 0)
        assert (audit(ledger, 1).once, audit(ledger, 1).excluded) == (4, 5)

    @pytest.mark.parametrize("skip", [SkipRange(block_id=-1), SkipRange(block_id=0, start=3, stop=3)])
    def test_a_range_of_nothing_is_refused(self, ledger: Ledger, skip: SkipRange) -> None:
        with pytest.raises(LedgerError, match="names no samples"):
            ledger.exclude([SkipRange(block_id=0), skip], "noise")
        assert ledger.exclusions() == []

    def test_progress_counts_excluded_samples_as_done(self, ledger: Ledger) -> None:
        ledger.exclude([SkipRange(block_id=0, start=0, stop=1)], "noise")
        session = join(ledger)
        lease = claim(ledger, session)[0]
        ledger.complete(lease, whole(lease))
        ledger.commit("a", "digest", [session.session_id])
        assert ledger.status().samples_committed == 2

"""Claims: in order, exclusive, and an honest answer where there is nothing to hand out."""

from __future__ import annotations

import pytest

from ledger.stage import CHUNKS, TIMEOUT_S, Stage, claim, join, learn, learn_all, refused, seen
from penstock.errors import LedgerError, LedgerMismatch
from penstock.ledger import EpochDone, Ledger, Wait
from penstock.types import ChunkRef


class ClaimBehaviour:
    def test_chunks_go_in_order_to_whoever_asks(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        asking = [two, one, one, two, one]
        leases = [claim(ledger, session)[0] for session in asking]
        assert [lease.ref for lease in leases] == CHUNKS
        assert [lease.session_id for lease in leases] == [session.session_id for session in asking]

    def test_a_lease_says_what_it_holds(self, ledger: Ledger) -> None:
        leases = claim(ledger, join(ledger), 5)
        assert [lease.samples for lease in leases] == [2, 2, 1, 2, 2]
        assert {(lease.epoch, lease.start, lease.start_offset) for lease in leases} == {(0, 0, 0)}
        assert len({lease.token for lease in leases}) == 5

    def test_several_at_a_time_are_the_next_ones_in_order(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        assert [lease.ref for lease in claim(ledger, one, 2)] == CHUNKS[:2]
        assert [lease.ref for lease in claim(ledger, two, 100)] == CHUNKS[2:]

    def test_chunks_that_came_back_go_first_then_those_nobody_had(self, ledger: Ledger) -> None:
        gone, stays, late = join(ledger, "gone"), join(ledger, "stays"), join(ledger, "late")
        claim(ledger, gone, 2)
        claim(ledger, stays)
        ledger.leave(gone)
        assert [lease.ref for lease in claim(ledger, late, 3)] == [CHUNKS[0], CHUNKS[1], CHUNKS[3]]

    @pytest.mark.parametrize("count", [0, -1])
    def test_a_claim_of_nothing_is_refused(self, ledger: Ledger, count: int) -> None:
        with pytest.raises(LedgerError, match=f"count={count} claims nothing: expected 1 or more"):
            ledger.claim(join(ledger), count)

    def test_a_block_of_any_size_is_claimed_without_counting_through_it(self, stage: Stage) -> None:
        stage.catalog.sizes = [10**15]
        ledger = stage.open()
        assert claim(ledger, join(ledger), 2)[1].ref == ChunkRef(0, 1)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def test_a_full_round_hands_out_nothing_until_it_is_committed(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        learn(ledger, one)
        claim(ledger, two)
        assert _reason(refused(ledger, two, round_chunks=2)) == "round"
        ledger.commit("a", "digest", [one.session_id])
        assert isinstance(ledger.claim(two, round_chunks=2), list)
        assert _reason(refused(ledger, one, round_chunks=2)) == "round"

    def test_a_claim_of_several_stops_where_the_round_ends(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        claim(ledger, one)
        claimed = ledger.claim(two, 4, round_chunks=3)
        assert isinstance(claimed, list)
        assert [lease.ref for lease in claimed] == CHUNKS[1:3]

    def test_a_dead_workers_chunks_do_not_fill_the_round(self, ledger: Ledger, stage: Stage) -> None:
        claim(ledger, join(ledger, "dead"), 2)
        stage.clock.now += TIMEOUT_S
        claimed = ledger.claim(join(ledger), 2, round_chunks=2)
        assert isinstance(claimed, list)
        assert [lease.ref for lease in claimed] == CHUNKS[:2]

    # -- nothing to hand out -------------------------------------------------------------------------------------------

    def test_one_waits_while_the_rest_is_with_others(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        claim(ledger, one, 5)
        assert _reason(refused(ledger, two)) == "others"

    def test_one_waits_while_the_rest_is_trained_and_not_committed(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn_all(ledger, session)
        assert _reason(refused(ledger, session)) == "others"
        ledger.commit("a", "digest", [session.session_id])
        assert refused(ledger, session) == EpochDone(epoch=0)

    def test_a_wait_ends_when_the_next_worker_could_be_fenced(self, ledger: Ledger, stage: Stage) -> None:
        claim(ledger, join(ledger, "dead"), 5)
        stage.clock.now += TIMEOUT_S - 0.25
        wait = refused(ledger, join(ledger))
        assert isinstance(wait, Wait)
        assert wait.until == stage.clock.now + 0.25
        assert wait.delay_s == 0.25

    @pytest.mark.parametrize("round_chunks", [None, 5])
    def test_a_wait_is_short_and_told_on_the_ledgers_clock(
        self, ledger: Ledger, stage: Stage, round_chunks: int | None
    ) -> None:
        session = join(ledger)
        claim(ledger, session, 5)
        wait = refused(ledger, session, round_chunks)
        assert isinstance(wait, Wait)
        assert wait.until == stage.clock.now + wait.delay_s
        assert 0 < wait.delay_s <= 1

    # -- blocks that still arrive --------------------------------------------------------------------------------------

    def test_one_waits_for_blocks_that_still_arrive_and_gets_them(self, stage: Stage) -> None:
        stage.catalog.sizes, stage.catalog.complete = [5], False
        ledger = stage.open()
        session = join(ledger)
        learn(ledger, session, 3)
        ledger.commit("a", "digest", [session.session_id])
        assert _reason(refused(ledger, session)) == "blocks"
        stage.catalog.sizes.append(4)
        assert [lease.ref for lease in learn(ledger, session, 9)] == CHUNKS[3:]
        ledger.commit("b", "digest", [session.session_id])
        assert _reason(refused(ledger, session)) == "blocks"
        stage.catalog.complete = True
        assert refused(ledger, session) == EpochDone(epoch=0)

    def test_a_block_that_arrived_since_the_claim_looked_is_not_taken_for_the_end(self, stage: Stage) -> None:
        stage.catalog.sizes, stage.catalog.complete = [2], False
        ledger = stage.open()
        session = join(ledger)
        learn(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        stage.catalog.sizes.append(2)
        stage.catalog.complete = True
        assert not ledger.epoch_done()
        assert ledger.advance_epoch(0) == 0
        assert [lease.ref for lease in claim(ledger, session)] == [ChunkRef(1, 0)]

    def test_a_data_set_without_blocks_is_done_at_once(self, stage: Stage) -> None:
        stage.catalog.sizes = []
        ledger = stage.open()
        assert refused(ledger, join(ledger)) == EpochDone(epoch=0)

    # -- blocks that change --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("change", ["altered", "resized", "gone"])
    def test_a_changed_block_is_refused_and_nothing_is_handed_out(self, stage: Stage, change: str) -> None:
        ledger = stage.open()
        session = join(ledger)
        claim(ledger, session)
        before = seen(ledger)
        _change_first_block(stage, change)
        with pytest.raises(LedgerMismatch, match="block 0 has changed since this run first used it"):
            ledger.claim(session)
        with pytest.raises(LedgerMismatch, match="expected 5 samples, sound 0"):
            ledger.check_blocks()
        assert seen(ledger) == before

    @pytest.mark.parametrize("change", ["altered", "resized", "gone"])
    def test_a_chunk_that_came_back_is_not_handed_out_of_a_changed_block(self, stage: Stage, change: str) -> None:
        ledger = stage.open()
        gone, session = join(ledger, "gone"), join(ledger)
        claim(ledger, gone)
        ledger.leave(gone)
        _change_first_block(stage, change)
        with pytest.raises(LedgerMismatch, match="block 0 has changed"):
            ledger.claim(session)

    def test_blocks_that_were_not_used_yet_may_change(self, stage: Stage) -> None:
        ledger = stage.open()
        claim(ledger, join(ledger))
        stage.catalog.altered.add(1)
        ledger.check_blocks()


def _reason(answer: Wait | EpochDone) -> str:
    assert isinstance(answer, Wait), answer
    return answer.reason


def _change_first_block(stage: Stage, change: str) -> None:
    if change == "altered":
        stage.catalog.altered.add(0)
    elif change == "resized":
        stage.catalog.sizes[0] = 6
    else:
        stage.catalog.sizes.clear()

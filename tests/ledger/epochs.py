"""Epochs: over when every chunk of every block is committed, and advanced once however many see the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from ledger.stage import CHUNKS, Stage, audit, claim, join, learn_all, refused, seen, whole
from penstock.ledger import EpochDone, Ledger


class EpochBehaviour:
    def test_an_epoch_is_done_when_its_last_chunk_is_committed_and_not_before(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        last = claim(ledger, two)[0]
        learn_all(ledger, one)
        ledger.commit("a", "digest", [one.session_id])
        assert not ledger.epoch_done()
        ledger.complete(last, whole(last))
        assert not ledger.epoch_done()
        assert ledger.advance_epoch(0) == 0
        ledger.commit("b", "digest", [two.session_id])
        assert ledger.epoch_done()
        assert refused(ledger, one) == EpochDone(epoch=0)
        assert ledger.advance_epoch(0) == 1

    def test_an_epoch_is_not_done_while_a_chunk_was_never_asked_for(self, ledger: Ledger) -> None:
        session = join(ledger)
        for name in "abcd":
            ledger.complete(lease := claim(ledger, session)[0], whole(lease))
            ledger.commit(name, "digest", [session.session_id])
            assert not ledger.epoch_done()

    def test_an_epoch_is_not_done_while_a_chunk_has_come_back(self, ledger: Ledger) -> None:
        one, two = join(ledger, "one"), join(ledger, "two")
        claim(ledger, two)
        learn_all(ledger, one)
        ledger.commit("a", "digest", [one.session_id])
        ledger.leave(two)
        assert not ledger.epoch_done()

    def test_the_next_epoch_hands_out_every_chunk_again(self, ledger: Ledger) -> None:
        session = join(ledger)
        for epoch in range(3):
            learn_all(ledger, session)
            ledger.commit(f"end of {epoch}", "digest", [session.session_id])
            assert audit(ledger, epoch).holds
            assert ledger.advance_epoch(epoch) == epoch + 1
        leases = claim(ledger, session, 9)
        assert [lease.ref for lease in leases] == CHUNKS
        assert {lease.epoch for lease in leases} == {3}
        assert ledger.status().samples_committed == 0

    def test_advancing_from_an_epoch_that_is_not_the_current_one_changes_nothing(self, ledger: Ledger) -> None:
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        ledger.advance_epoch(0)
        before = seen(ledger)
        assert [ledger.advance_epoch(epoch) for epoch in (-1, 0, 1, 2)] == [1, 1, 1, 1]
        assert seen(ledger) == before

    def test_an_epoch_advances_once_however_many_threads_see_its_end(self, stage: Stage) -> None:
        stage.catalog.sizes = []  # so that every epoch is done, and a second advance would be possible
        ledger = stage.open()
        start = Barrier(8)

        def advance() -> int:
            start.wait()
            epoch = ledger.advance_epoch(0)
            ledger.close()
            return epoch

        with ThreadPoolExecutor(8) as pool:
            epochs = [done.result() for done in [pool.submit(advance) for _ in range(8)]]
        assert epochs == [1] * 8
        assert ledger.status().epoch == 1

    def test_an_epoch_is_not_done_while_blocks_still_arrive(self, stage: Stage) -> None:
        stage.catalog.complete = False
        ledger = stage.open()
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        assert not ledger.epoch_done()
        assert ledger.advance_epoch(0) == 0
        stage.catalog.complete = True
        assert ledger.epoch_done()
        assert ledger.advance_epoch(0) == 1

"""Identity: a ledger belongs to one data set and one way to cut it, and can be read without either."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger.stage import IDENTITY, Stage, claim, join, learn, seen
from penstock.errors import LedgerError, LedgerMismatch
from penstock.ledger import Ledger
from penstock.types import DatasetIdentity


class IdentityBehaviour:
    @pytest.mark.parametrize(
        ("other", "difference"),
        [
            (replace(IDENTITY, dataset_id="numbers"), "dataset_id: got 'numbers', expected 'letters'"),
            (replace(IDENTITY, block_size=6), "block_size: got 6, expected 5"),
            (replace(IDENTITY, chunk_size=3), "chunk_size: got 3, expected 2"),
        ],
        ids=["dataset_id", "block_size", "chunk_size"],
    )
    def test_other_data_is_refused_naming_the_field(
        self, ledger: Ledger, stage: Stage, other: DatasetIdentity, difference: str
    ) -> None:
        learn(ledger, join(ledger))
        before = seen(ledger)
        with pytest.raises(LedgerMismatch, match=f"belongs to other data: {difference}: name another run"):
            stage.open(identity=other)
        assert seen(ledger) == before

    def test_all_differences_are_named_at_once(self, ledger: Ledger, stage: Stage) -> None:
        assert ledger.last_commit() is None
        with pytest.raises(LedgerMismatch, match=r"block_size: got 7, .*; chunk_size: got 8, .*; dataset_id: got 'x'"):
            stage.open(identity=DatasetIdentity(dataset_id="x", block_size=7, chunk_size=8))

    def test_a_ledger_can_be_read_without_knowing_what_it_belongs_to(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        learn(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        assert seen(stage.open(identity=None)) == seen(ledger)

    def test_chunks_cannot_be_claimed_without_knowing_how_they_are_cut(self, ledger: Ledger, stage: Stage) -> None:
        session = join(ledger)
        with pytest.raises(LedgerError, match="opened to read: open it with an identity and a catalog to claim"):
            stage.open(identity=None).claim(session)
        assert len(claim(ledger, session, 9)) == 5

    def test_reading_a_ledger_that_does_not_exist_is_refused_and_makes_none(self, stage: Stage) -> None:
        for _ in range(2):
            with pytest.raises(LedgerError, match="there is no ledger"):
                stage.open(identity=None)

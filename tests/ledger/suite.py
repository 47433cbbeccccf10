"""What every ledger store promises: subclass `LedgerSuite` and give it a `stage` fixture, an empty store a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ledger.choosing import ChoosingBehaviour
from ledger.claiming import ClaimBehaviour
from ledger.commits import CommitBehaviour
from ledger.concurrency import ConcurrencyBehaviour
from ledger.epochs import EpochBehaviour
from ledger.fencing import FencingBehaviour
from ledger.identity import IdentityBehaviour
from ledger.loaders import LoaderBehaviour
from ledger.progress import ProgressBehaviour
from ledger.restoring import RestoreBehaviour
from ledger.stage import Stage
from ledger.steps import StepBehaviour
from penstock.ledger import Ledger


class LedgerSuite(
    ClaimBehaviour,
    ChoosingBehaviour,
    FencingBehaviour,
    ProgressBehaviour,
    CommitBehaviour,
    RestoreBehaviour,
    LoaderBehaviour,
    EpochBehaviour,
    StepBehaviour,
    IdentityBehaviour,
    ConcurrencyBehaviour,
):
    """All of the contract in `penstock.ledger.base` that can be seen through it."""

    @pytest.fixture
    def ledger(self, stage: Stage) -> Iterator[Ledger]:
        ledger = stage.open()
        yield ledger
        ledger.close()

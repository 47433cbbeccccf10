"""Any history of joins, claims, deaths, commits and restores: the ledger's word is what the weights have learned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ledger.clocked import ClockedStage, PostgresStage, SqliteStage
from ledger.model import SEQUENCES, Held, Model, Worker
from ledger.stage import CHUNK_SIZE, TIMEOUT_S, seen
from penstock.errors import LeaseLost, LedgerError
from penstock.ledger import Exclusions, Progress, SkipRange, Wait, audit_epoch
from penstock.ledger.audit import learned
from penstock.types import ChunkRef

BLOCKS = (5, 1, 4)


class AnyHistory(RuleBasedStateMachine):
    """Drives a ledger and the model side by side. Workers draw lots by index, so that examples shrink well."""

    def set_stage(self) -> ClockedStage:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.stage = self.set_stage()
        self.model = Model(self.stage.catalog, self.stage.clock)
        self.ledger = self.stage.unopened()
        self.names = 0
        self.heard_of: set[int] = set()

    @initialize(missing=st.integers(0, len(BLOCKS)), workers=st.integers(1, 3))
    def begin(self, missing: int, workers: int) -> None:
        self.stage.catalog.sizes = list(BLOCKS[: len(BLOCKS) - missing])
        self.stage.catalog.complete = not missing
        self.ledger.open()
        for _ in range(workers):
            self.join()

    # -- the world -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.stage.catalog.complete)
    @rule()
    def a_block_arrives(self) -> None:
        sizes = self.stage.catalog.sizes
        if len(sizes) < len(BLOCKS):
            sizes.append(BLOCKS[len(sizes)])
        else:
            self.stage.catalog.complete = True

    @rule(
        seconds=st.sampled_from([1.0, TIMEOUT_S / 2, TIMEOUT_S, -TIMEOUT_S / 4, None]),
        beating=st.sets(st.integers(0, 3)),
        look=st.booleans(),
    )
    def time_passes(self, seconds: float | None, beating: set[int], look: bool) -> None:
        """Or the machine boots, and its clock starts anew."""
        if seconds is None:
            self.stage.clock.boot_id += "+"
            self.stage.clock.now = 0.0
        else:
            self.stage.clock.now += seconds
        for index, worker in enumerate(self.model.living):
            if index in beating:
                worker.deadline = self.stage.clock.now + TIMEOUT_S
                worker.boot_id = self.stage.clock.boot_id
                assert self.ledger.heartbeat(worker.session) == worker.deadline
        if look:
            assert self.ledger.fence_silent() == self.model.fence_silent()

    # -- workers -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.living) < 3)
    @rule()
    def join(self) -> None:
        self.model.join(self.ledger.join("worker", generation=self.model.generation))

    @precondition(lambda self: self.model.living)
    @rule(index=st.integers(0, 3))
    def leave(self, index: int) -> None:
        worker = self.one_of_the_living(index)
        self.ledger.leave(worker.session)
        self.model.lose(worker)

    @precondition(lambda self: self.stragglers)
    @rule()
    def a_lost_worker_acts(self) -> None:
        lost = self.stragglers[0]
        self.heard_of.add(lost.session.session_id)
        before = seen(self.ledger)
        for act in (self.ledger.heartbeat, self.ledger.claim, lambda session: self.ledger.take_step(session, None)):
            with pytest.raises(LeaseLost):
                act(lost.session)
        with pytest.raises(LeaseLost):
            self.ledger.commit("late", "digest", [lost.session.session_id])
        for held in lost.held.values():
            with pytest.raises(LeaseLost):
                self.ledger.record(held.lease, _progress(held, held.offset))
            with pytest.raises(LeaseLost):
                self.ledger.complete(held.lease, _progress(held, held.lease.samples * SEQUENCES))
        self.ledger.leave(lost.session)
        assert seen(self.ledger) == before

    # -- chunks --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.living)
    @rule(index=st.integers(0, 3), count=st.integers(1, 3), round_chunks=st.none() | st.integers(1, 5))
    def claim(self, index: int, count: int, round_chunks: int | None) -> None:
        worker = self.one_of_the_living(index)
        claimed = self.ledger.claim(worker.session, count, round_chunks=round_chunks)
        self.model.fence_silent(but=worker)
        expected = self.model.answer(count, round_chunks)
        if isinstance(claimed, list):
            assert [lease.ref for lease in claimed] == expected, (self.model.priorities, self.model.excluded)
            for lease in claimed:
                self.model.lease(worker, lease)
        else:
            assert (claimed.reason if isinstance(claimed, Wait) else claimed) == expected

    @precondition(lambda self: self.model.living)
    @rule(
        index=st.integers(0, 3),
        which=st.integers(0, 2),
        sequences=st.integers(0, SEQUENCES),
        and_commit=st.booleans(),
    )
    def learn_a_part(self, index: int, which: int, sequences: int, and_commit: bool) -> None:
        """Or nothing, and say again how far it is."""
        worker, held = self.one_at_work(index, which)
        end = held.lease.samples * SEQUENCES if held else 0
        if held and sequences and held.offset < end:
            self.take_step(worker)
            self.model.learn(worker, held, min(held.offset + sequences, end))
        if held:
            self.ledger.record(held.lease, _progress(held, held.offset))
        if and_commit:
            self.commit_all([worker])

    @precondition(lambda self: self.model.living)
    @rule(index=st.integers(0, 3), which=st.integers(0, 2))
    def learn_the_rest(self, index: int, which: int) -> None:
        worker, held = self.one_at_work(index, which)
        if held:
            self.finish(worker, held)

    # -- what the user wants -------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 9), priority=st.sampled_from([2.0, 1.0, -1.0]))
    def prioritise(self, which: int, priority: float) -> None:
        refs = [ChunkRef(block, chunk) for block, size in enumerate(BLOCKS) for chunk in range(-(-size // CHUNK_SIZE))]
        ref = refs[which % len(refs)]
        if ref.block_id >= len(self.stage.catalog.sizes):
            before = seen(self.ledger)
            with pytest.raises(LedgerError, match="there is no chunk"):
                self.ledger.prioritise({ref: priority})
            assert seen(self.ledger) == before
            return
        self.ledger.prioritise({ref: priority})
        self.model.priorities[ref] = priority

    @precondition(lambda self: len(self.model.excluded) < 4)
    @rule(block_id=st.integers(0, len(BLOCKS) - 1), start=st.integers(0, 4), length=st.integers(1, 4))
    def exclude(self, block_id: int, start: int, length: int) -> None:
        made = self.ledger.exclude([SkipRange(block_id=block_id, start=start, stop=start + length)], "noise")
        assert (made[0].epoch, made[0].step) == (self.model.now.epoch, self.model.next_step)
        self.model.exclude(block_id, start, start + length)

    # -- commits -------------------------------------------------------------------------------------------------------

    @rule(left_out=st.sets(st.integers(0, 3)), by_a_fresh_ledger=st.booleans())
    def commit(self, left_out: set[int], by_a_fresh_ledger: bool) -> None:
        if by_a_fresh_ledger:
            self.ledger.close()
            self.ledger = self.stage.unopened()
            self.ledger.open()
        contributors = [worker for index, worker in enumerate(self.model.living) if index not in left_out]
        self.refuse_what_cannot_be([worker.session.session_id for worker in contributors])
        self.commit_all(contributors)

    @precondition(lambda self: self.model.commits)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from([None, *self.model.commits, *self.model.commits]))
        self.model.restore(target)
        assert self.ledger.restore(target) == self.model.generation
        with pytest.raises(LeaseLost):
            self.ledger.join("straggler", generation=self.model.generation - 1)
        self.join()

    @precondition(lambda self: self.model.living)
    @rule(index=st.integers(0, 3), go_on=st.booleans())
    def learn_all_there_is(self, index: int, go_on: bool) -> None:
        """What a worker left alone would do; brings histories to the end of their epochs."""
        worker = self.one_of_the_living(index)
        self.model.fence_silent(but=worker)
        while isinstance(claimed := self.ledger.claim(worker.session, 3), list):
            for lease in claimed:
                self.model.lease(worker, lease)
        for held in _unfinished(worker):
            self.finish(worker, held)
        self.commit_all([worker])
        if go_on and self.model.is_epoch_done():
            self.advance_epoch()

    @precondition(lambda self: self.model.is_epoch_done())
    @rule()
    def advance_epoch(self) -> None:
        self.model.now.epoch += 1
        assert self.ledger.advance_epoch(self.model.now.epoch - 1) == self.model.now.epoch

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def the_spans_are_what_the_weights_have_learned(self) -> None:
        epochs = range(self.model.now.epoch + 2)
        spans = {epoch: list(self.ledger.spans(epoch)) for epoch in epochs}
        journal = self.ledger.exclusions()
        told = Counter(
            (epoch, span.ref.block_id, place)
            for epoch in epochs
            for span in spans[epoch]
            for start, stop in learned(span, CHUNK_SIZE, Exclusions(journal))
            for place in range(start, stop)
        )
        assert [[e.epoch, e.step, e.block_id, e.start, e.stop] for e in journal] == self.model.excluded
        weights = self.model.now.weights
        assert told == weights
        blocks = self.stage.catalog.sizes
        for epoch in epochs:
            audit = audit_epoch(epoch, spans[epoch], blocks, CHUNK_SIZE, journal)
            places = [(epoch, block_id, place) for block_id, size in enumerate(blocks) for place in range(size)]
            unlearned = [place for place in places if not weights[place]]
            excluded = sum(self.model.is_excluded(*place) for place in unlearned)
            assert (audit.missing, audit.excluded, audit.twice) == (len(unlearned) - excluded, excluded, 0)
            assert audit.once == len(places) - len(unlearned)
            assert audit.foreign == 0
            assert audit.holds or epoch >= self.model.now.epoch

    @invariant()
    def the_status_is_where_the_model_stands(self) -> None:
        status, model = self.ledger.status(), self.model
        assert (status.generation, status.epoch, status.total_steps) == (
            model.generation,
            model.now.epoch,
            model.now.total_steps,
        )
        assert status.samples_committed == model.now.passed[model.now.epoch]
        assert status.chunks["committed"] == sum(epoch == model.now.epoch for epoch, _ in model.now.closed)
        assert status.chunks["leased"] + status.chunks["trained"] == len(model.in_hand)
        assert [commit.checkpoint_id for commit in self.ledger.commits()] == list(model.commits)
        assert self.ledger.epoch_done() == model.is_epoch_done()

    @invariant()
    def pending_is_what_the_living_have_learned(self) -> None:
        told = {work.session_id: (work.samples, work.steps) for work in self.ledger.pending()}
        assert told == {
            worker.session.session_id: (worker.passed, worker.steps)
            for worker in self.model.living
            if worker.steps or any(held.complete for held in worker.held.values())
        }

    def teardown(self) -> None:
        """Whatever has happened, the run can be resumed and its epoch ends with every sample learned once."""
        try:
            self.stage.catalog.sizes[:] = BLOCKS
            self.stage.catalog.complete = True
            last = next(reversed(self.model.commits), None)
            self.model.restore(last)
            self.ledger.restore(last)
            self.join()
            self.learn_all_there_is(0, go_on=False)
            self.the_spans_are_what_the_weights_have_learned()
            assert self.ledger.epoch_done()
            epoch = self.model.now.epoch
            spans, journal = self.ledger.spans(epoch), self.ledger.exclusions()
            assert audit_epoch(epoch, spans, list(BLOCKS), CHUNK_SIZE, journal).holds
        finally:
            self.ledger.close()
            self.strike_stage()

    def strike_stage(self) -> None:
        raise NotImplementedError

    # -- short ways ----------------------------------------------------------------------------------------------------

    @property
    def stragglers(self) -> list[Worker]:
        """Workers that are lost and may not know it yet."""
        return [each for each in self.model.workers if each.lost and each.session.session_id not in self.heard_of]

    def refuse_what_cannot_be(self, living: list[int]) -> None:
        before = seen(self.ledger)
        for lost in self.stragglers:
            with pytest.raises(LeaseLost):
                self.ledger.commit("void", "digest", [*living, lost.session.session_id])
        for checkpoint_id in self.model.commits:
            with pytest.raises(LedgerError, match="is committed already"):
                self.ledger.commit(checkpoint_id, "digest", living)
        with pytest.raises(LedgerError, match="no commit of checkpoint"):
            self.ledger.restore("never made")
        if not self.model.is_epoch_done():
            assert self.ledger.advance_epoch(self.model.now.epoch) == self.model.now.epoch
        assert self.ledger.advance_epoch(self.model.now.epoch - 1) == self.model.now.epoch
        assert seen(self.ledger) == before

    def one_of_the_living(self, index: int) -> Worker:
        return self.model.living[index % len(self.model.living)]

    def one_at_work(self, index: int, which: int) -> tuple[Worker, Held | None]:
        """A worker and a chunk that it is not done with, claimed where it has none; None where there is none."""
        worker = self.one_of_the_living(index)
        if not _unfinished(worker):
            self.claim(index, 1, None)
        chunks = _unfinished(worker)
        return worker, chunks[which % len(chunks)] if chunks else None

    def take_step(self, worker: Worker) -> None:
        """Take the last step that a limit allows."""
        limit = self.model.now.total_steps + sum(each.steps for each in self.model.living) + 1
        assert self.ledger.take_step(worker.session, limit) == self.model.next_step
        assert self.ledger.take_step(worker.session, limit) is None

    def finish(self, worker: Worker, held: Held) -> None:
        end = held.lease.samples * SEQUENCES
        if held.offset < end:
            self.take_step(worker)
            self.model.learn(worker, held, end)
        for _ in range(2):
            self.ledger.complete(held.lease, _progress(held, end))
        held.complete = True

    def commit_all(self, contributors: list[Worker]) -> None:
        self.names += 1
        commit = self.ledger.commit(str(self.names), "digest", [w.session.session_id for w in contributors])
        self.model.commit(str(self.names), contributors)
        now = self.model.now
        assert (commit.epoch, commit.total_steps, commit.next_step) == (now.epoch, now.total_steps, now.next_step)


def _unfinished(worker: Worker) -> list[Held]:
    return [held for held in worker.held.values() if not held.complete]


def _progress(held: Held, offset: int) -> Progress:
    return Progress(samples=offset // SEQUENCES, offset=offset, steps=held.steps)


class InSqlite(AnyHistory):
    """In a file of its own."""

    def set_stage(self) -> ClockedStage:
        self.folder = TemporaryDirectory()
        return SqliteStage(Path(self.folder.name, "ledger.sqlite"))

    def strike_stage(self) -> None:
        self.folder.cleanup()


class InPostgres(AnyHistory):
    """In a run of its own on the session's server."""

    server_url: ClassVar[str]

    def set_stage(self) -> ClockedStage:
        self.run_stage = PostgresStage(self.server_url)
        return self.run_stage

    def strike_stage(self) -> None:
        self.run_stage.drop()


HARD = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_any_history_in_sqlite() -> None:
    run_state_machine_as_test(InSqlite, settings=HARD)


def test_any_history_in_postgresql(postgres: str) -> None:
    InPostgres.server_url = postgres
    run_state_machine_as_test(InPostgres, settings=settings(HARD, max_examples=20))

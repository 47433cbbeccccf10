"""Ranks that learn every batch together: the same batches on any number of them, through stops, crashes and resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from equipment.hooks import Recorder
from equipment.ranks import batches_learned, batches_planned, exit_codes, ranks_of, train_as_ranks, wait_for_steps
from equipment.training import SAMPLES, assert_learned_exactly, counting_config, weights
from penstock.errors import ConfigError
from penstock.ledger import SkipRange
from penstock.observe.history import what_step_saw
from penstock.observe.proof import prove
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest


def job(store: Path, run_dir: Path, **changes: object) -> TrainingConfig:
    """Batches of three, so that of four ranks one never has a sequence; a commit at every step, all of them kept."""
    settings = {"ddp": True, "batch_size": 3, "commit_every_s": 1e-9, "keep_checkpoints": 9_999, "rank_timeout_s": 60.0}
    return counting_config(store, run_dir, **{**settings, **changes})


def last_event(run_dir: Path) -> dict:
    return list(RunFolder(run_dir).events())[-1]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_learns_the_same_global_batches(store: Path, tmp_path: Path, world: int) -> None:
    train_as_ranks(job(store, tmp_path), world)
    assert batches_learned(tmp_path) == batches_planned(tmp_path)
    assert_learned_exactly(tmp_path)


def test_a_job_goes_on_with_fewer_ranks_as_if_never_interrupted(store: Path, tmp_path: Path) -> None:
    train_as_ranks(job(store, tmp_path, steps=8), 4)
    assert last_event(tmp_path)["reason"] == "steps"
    train_as_ranks(job(store, tmp_path), 3)
    assert batches_learned(tmp_path) == batches_planned(tmp_path)
    assert_learned_exactly(tmp_path)


def test_one_process_follows_the_strided_plan_too_and_ranks_go_on(store: Path, tmp_path: Path) -> None:
    result = run_training(job(store, tmp_path, ddp=False, plan="strided", steps=5))
    assert (result.reason, result.total_steps) == ("steps", 5)
    train_as_ranks(job(store, tmp_path, iterate=True, steps=30), 2)
    assert batches_learned(tmp_path) == batches_planned(tmp_path, epochs=2)[:30]


def test_epochs_have_orders_of_their_own_and_each_is_proven(store: Path, tmp_path: Path) -> None:
    per_epoch = run_training(job(store, tmp_path, ddp=False, plan="strided", commit_every_s=60.0)).total_steps
    config = job(store, tmp_path, ddp=False, iterate=True, steps=2 * per_epoch, commit_every_s=60.0)
    assert run_training(config).reason == "steps"
    assert_learned_exactly(tmp_path, times=2)
    planned = batches_planned(tmp_path, epochs=2)
    assert planned[:per_epoch] != planned[per_epoch:]
    again = run_training(job(store, tmp_path, ddp=False))
    assert (again.reason, again.total_steps) == ("epoch", 2 * per_epoch), "a limit at the epoch's end ends it"


def test_stop_after_epoch_ends_ranks_though_iterate_would_go_on(store: Path, tmp_path: Path) -> None:
    train_as_ranks(job(store, tmp_path, iterate=True, stop_after_epoch=True, commit_every_s=60.0), 2)
    assert last_event(tmp_path)["reason"] == "epoch"
    assert_learned_exactly(tmp_path)


@pytest.mark.parametrize("world", [2, 3])
def test_chunks_that_rank_0_claims_are_learned_by_all_ranks_once(store: Path, tmp_path: Path, world: int) -> None:
    config = job(store, tmp_path, plan="claims", batch_size=2, steps=9, commit_every_s=60.0)
    train_as_ranks(config, world)
    run_training(counting_config(store, tmp_path, steps=15))  # one worker takes over, and ranks again
    config.steps = None
    train_as_ranks(config, world - 1)
    assert_learned_exactly(tmp_path)
    seen = [what_step_saw(RunFolder(tmp_path), step)[0] for step in range(1, last_event(tmp_path)["total_steps"] + 1)]
    assert {sample for each in seen for first, stop in each.samples for sample in range(first, stop)} == set(
        range(SAMPLES)
    )


def test_what_a_step_saw_is_told_from_the_plan(store: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    config = job(store, tmp_path, ddp=False, plan="strided", commit_every_s=60.0)
    run_training(config, [Recorder().when("step", 7, lambda _: stop.set())], stop=stop)
    run_training(config)
    folder, planned = RunFolder(tmp_path), batches_planned(tmp_path)
    for step, samples in enumerate(planned, 1):
        (seen,) = what_step_saw(folder, step)
        ids = {sample for first, stop_ in seen.samples for sample in range(first, stop_)}
        assert set(samples) <= ids
        assert seen.checkpoint_id == ("00000007" if step <= 7 else f"{len(planned):08d}")
    folder.ledger.restore("00000007")
    assert what_step_saw(folder, 7)[0].checkpoint_id == "00000007"
    (undone,) = what_step_saw(folder, 9)
    assert undone.checkpoint_id is None
    assert set(planned[8]) <= {sample for first, stop_ in undone.samples for sample in range(first, stop_)}


def test_the_audit_of_a_job_under_way_counts_what_is_committed(store: Path, tmp_path: Path) -> None:
    run_training(job(store, tmp_path, ddp=False, plan="strided", steps=4))
    (found,) = prove(RunFolder(tmp_path))
    learned = int(weights(tmp_path)["model.counts"].sum())
    assert (found.once, found.missing, found.twice) == (learned, SAMPLES - learned, 0)
    assert RunFolder(tmp_path).ledger.status().samples_committed == learned


def test_a_commit_that_skipped_batches_does_not_pass_the_audit(store: Path, tmp_path: Path) -> None:
    run_training(job(store, tmp_path, ddp=False, plan="strided"))
    import sqlite3

    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("DELETE FROM loader_spans WHERE commit_seq = 5")
    (found,) = prove(RunFolder(tmp_path))
    assert found.missing
    assert not found.holds


def test_samples_that_are_skipped_are_not_learned_by_any_rank(store: Path, tmp_path: Path) -> None:
    train_as_ranks(job(store, tmp_path, commit_every_s=60.0), 2)
    RunFolder(tmp_path).ledger.exclude([SkipRange(block_id=1, start=3, stop=7), SkipRange(block_id=2)], "noise")
    train_as_ranks(job(store, tmp_path, iterate=True, stop_after_epoch=True, commit_every_s=60.0), 1)
    assert last_event(tmp_path)["reason"] == "epoch"
    run_training(job(store, tmp_path, ddp=False, iterate=True, steps=20, commit_every_s=60.0))
    train_as_ranks(job(store, tmp_path, commit_every_s=60.0), 3)
    skipped = {*range(28, 32), *range(50, 60)}
    counts = weights(tmp_path)["model.counts"].tolist()
    assert [sample for sample in range(SAMPLES) if counts[sample] == 1] == sorted(skipped)
    first, second = prove(RunFolder(tmp_path))
    assert first.holds
    assert second.holds
    assert (second.once, second.excluded) == (SAMPLES - len(skipped), len(skipped))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_any_rank_stops_all_at_the_same_step(store: Path, tmp_path: Path, number: int) -> None:
    config = job(store, tmp_path, iterate=True)
    with ranks_of(config, 3) as processes:
        wait_for_steps(tmp_path, 2)
        os.kill(processes[1].pid or 0, number)
        assert exit_codes(processes) == [0, 0, 0]
    stopped = last_event(tmp_path)
    steps = [event["step"] for event in RunFolder(tmp_path).events() if event["event"] == "step"]
    assert (stopped["reason"], stopped["total_steps"]) == ("signal", steps[-1])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_ends_the_others_and_the_job_goes_on_later(store: Path, tmp_path: Path, victim: int) -> None:
    with ranks_of(job(store, tmp_path, iterate=True), 3) as processes:
        wait_for_steps(tmp_path, 3)
        processes[victim].kill()
        codes = exit_codes(processes)
    assert codes.pop(victim) == -9
    assert codes == [1, 1]
    steps = RunFolder(tmp_path).ledger.status().total_steps
    train_as_ranks(job(store, tmp_path, steps=steps + 40, iterate=True), 2)
    assert batches_learned(tmp_path) == batches_planned(tmp_path, epochs=20)[: steps + 40]


@pytest.mark.alone
def test_a_rank_that_falls_silent_is_given_up_in_time(store: Path, tmp_path: Path) -> None:
    with ranks_of(job(store, tmp_path, iterate=True, rank_timeout_s=4.0), 2) as processes:
        wait_for_steps(tmp_path, 3)
        os.kill(processes[1].pid or 0, signal.SIGSTOP)
        processes[0].join(60)
        assert processes[0].exitcode == 1
    train_as_ranks(job(store, tmp_path, stop_after_epoch=True), 2)


def test_what_rank_0_refuses_is_told_by_every_rank(store: Path, tmp_path: Path) -> None:
    train_as_ranks(job(store, tmp_path, steps=2), 2)
    with ranks_of(job(store, tmp_path, batch_size=4), 2) as processes:
        assert exit_codes(processes) == [1, 1]


def test_a_run_keeps_its_plan(store: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, tmp_path, steps=2))
    with pytest.raises(ConfigError, match="plan: got 'strided', expected 'claims'"):
        run_training(counting_config(store, tmp_path, plan="strided"))
    run_training(job(store, tmp_path / "job", ddp=False, plan="strided", steps=2))
    with pytest.raises(ConfigError, match="follows the strided plan, which has no independent workers"):
        run_training(job(store, tmp_path / "job", ddp=False, parallel_independent=True, workers=2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel_independent": True}, "choose one"),
        ({"ddp": False, "parallel_independent": True, "plan": "strided"}, "it needs --ddp"),
        ({"plan": "pages"}, "plan='pages' is unknown"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s"),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate"),
        ({"respawn": -1}, "respawn"),
    ],
)
def test_settings_of_ranks_that_cannot_work_are_refused(
    store: Path, tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        run_training(job(store, tmp_path, **changes))


def test_processes_of_a_launcher_without_ddp_are_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK=1 of WORLD_SIZE=2.*add --ddp"):
        run_training(counting_config(store, tmp_path))
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT not set"):
        run_training(job(store, tmp_path))

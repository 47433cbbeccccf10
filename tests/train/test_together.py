"""Several workers: deaths, silence, stops; every sample once all the same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from equipment.hooks import Recorder
from equipment.training import assert_learned_exactly, counting_config, start_training, weights
from penstock.errors import TrainError
from penstock.ledger import Session
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest

pytestmark = pytest.mark.usefixtures("forked_workers")


def config(store: Path, run_dir: Path, **changes: object) -> TrainingConfig:
    return counting_config(store, run_dir, **{"parallel_independent": True, "workers": 2, **changes})


def pid_of(recorder: Recorder, session: int) -> int:
    return next(event["pid"] for event in recorder.of("worker_started") if event["session"] == session)


def test_workers_learn_disjoint_chunks_and_every_sample_once(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    run_training(config(store, tmp_path), [recorder])
    learned = [(event["block_id"], event["chunk_id"]) for event in recorder.of("chunk")]
    assert len(learned) == len(set(learned)) == 12
    assert_learned_exactly(tmp_path)


def test_a_killed_workers_chunks_are_learned_by_the_other(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.when("step", 9, lambda event: os.kill(pid_of(recorder, event["session"]), signal.SIGKILL))
    result = run_training(config(store, tmp_path), [recorder])
    assert result.reason == "epoch"
    assert [event["reason"] for event in recorder.of("worker_lost")] == ["killed by signal 9"]
    assert_learned_exactly(tmp_path)


def test_without_workers_the_run_ends_with_a_way_to_go_on(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()

    def kill_all(_: object) -> None:
        for event in recorder.of("worker_started"):
            os.kill(event["pid"], signal.SIGKILL)

    recorder.when("worker_started", 2, kill_all)
    with pytest.raises(TrainError, match=r"no worker is left .*killed by signal 9.*run the same command again"):
        run_training(config(store, tmp_path), [recorder])
    assert run_training(config(store, tmp_path)).reason == "epoch"
    assert_learned_exactly(tmp_path)


def test_a_stopped_worker_does_not_hold_up_the_others(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.when("step", 9, lambda event: os.kill(pid_of(recorder, event["session"]), signal.SIGSTOP))
    result = run_training(config(store, tmp_path, session_timeout_s=2.0), [recorder])
    assert result.reason == "epoch"
    assert_learned_exactly(tmp_path)


def test_a_fenced_worker_discards_what_it_learned_and_comes_back(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()

    def fence(event: dict) -> None:
        session = Session(session_id=event["session"], worker=event["worker"], generation=event["generation"])
        RunFolder(tmp_path).ledger.leave(session)

    recorder.when("step", 5, fence)
    run_training(config(store, tmp_path), [recorder])
    assert len(recorder.of("worker_lost")) == 1
    assert len(recorder.of("worker_started")) == 3
    assert_learned_exactly(tmp_path)


def test_commits_come_by_time_too_and_in_the_middle_of_a_chunk(store: Path, tmp_path: Path) -> None:
    run_training(config(store, tmp_path, dataset_chunk_size=25, commit_every_chunks=99, commit_every_s=1e-9))
    assert len(list(RunFolder(tmp_path).ledger.spans(0))) > 3, "every chunk was committed in one piece"
    assert_learned_exactly(tmp_path)


def test_steps_are_exact_over_all_workers(store: Path, tmp_path: Path) -> None:
    for steps in (7, 16):
        assert run_training(config(store, tmp_path, steps=steps)).total_steps == steps
    counts = weights(tmp_path)["model.counts"]
    assert counts.max() == 1


def test_a_wish_to_stop_commits_what_all_workers_have_learned(store: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    recorder = Recorder().when("step", 7, lambda _: stop.set())
    result = run_training(config(store, tmp_path), [recorder], stop=stop)
    assert result.reason == "signal"
    assert result.total_steps == len(recorder.of("step"))
    run_training(config(store, tmp_path))
    assert_learned_exactly(tmp_path)


def test_a_stop_of_the_whole_group_while_workers_start_is_a_clean_one(store: Path, tmp_path: Path) -> None:
    process = start_training(config(store, tmp_path), group=True, prepared=False)
    deadline = time.monotonic() + 60
    while not _children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid or 0, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 0
    last = list(RunFolder(tmp_path).events())[-1]
    assert (last["event"], last["reason"]) == ("run_stopped", "signal")
    run_training(config(store, tmp_path))
    assert_learned_exactly(tmp_path)


def _children(pid: int | None) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def _events(run_dir: Path) -> list[dict]:
    return list(RunFolder(run_dir).events()) if (run_dir / "metrics.jsonl").exists() else []


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_end_with_their_supervisor(store: Path, tmp_path: Path, stopped: bool) -> None:
    process = start_training(config(store, tmp_path, iterate=True), prepared=False)
    pids: list[int] = []
    deadline = time.monotonic() + 60
    while len(pids) < 2 and time.monotonic() < deadline:
        pids = [event["pid"] for event in _events(tmp_path) if event["event"] == "worker_started"]
        time.sleep(0.05)
    assert len(pids) == 2
    for pid in pids if stopped else []:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.join()
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_another_number_of_workers_goes_on_with_the_same_run(store: Path, tmp_path: Path) -> None:
    run_training(config(store, tmp_path, steps=8))
    run_training(counting_config(store, tmp_path, steps=14))
    run_training(config(store, tmp_path, workers=3))
    assert_learned_exactly(tmp_path)


def test_merged_replicas_learn(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    settings = config(store, tmp_path, model="tiny", merge="mean", learning_rate=1e-2, iterate=True, steps=120)
    run_training(settings, [recorder])
    losses = [event["loss"] for event in sorted(recorder.of("step"), key=lambda event: event["step"])]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])

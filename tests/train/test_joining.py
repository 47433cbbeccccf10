"""Workers that come late, come back, or hang; what becomes of their replicas; and who gets how many chunks."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from equipment.hooks import Recorder
from equipment.ranks import PATIENCE_S
from equipment.training import assert_learned_exactly, counting_config, make_store, weights
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.outer import outer_step
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest

pytestmark = pytest.mark.usefixtures("forked_workers")


def config(store: Path, run_dir: Path, **changes: object) -> TrainingConfig:
    return counting_config(store, run_dir, **{"parallel_independent": True, "workers": 2, **changes})


def pid_of(recorder: Recorder, session: int) -> int:
    return next(event["pid"] for event in recorder.of("worker_started") if event["session"] == session)


def test_workers_come_back_and_join_and_every_sample_counts_once(store: Path, tmp_path: Path) -> None:
    recorder, stop = Recorder(), StopRequest()
    deadline = time.monotonic() + PATIENCE_S

    def end_when_all_have_come(_: dict) -> None:
        if len(recorder.of("worker_started")) == 3 or time.monotonic() > deadline:
            stop.set()

    # The only worker dies and is started again; another one joins meanwhile; then the endless run is ended.
    recorder.when("step", 4, lambda event: os.kill(pid_of(recorder, event["session"]), signal.SIGKILL))
    recorder.when("worker_lost", 1, lambda _: RunFolder(tmp_path).leave_word("join", "1"))
    for nth in range(1, 10_000):
        recorder.when("commit", nth, end_when_all_have_come)
    result = run_training(config(store, tmp_path, workers=1, respawn=1, iterate=True), [recorder], stop=stop)
    assert result.reason == "signal"
    started = [event["worker"] for event in recorder.of("worker_started")]
    assert sorted(started) == ["worker-0", "worker-0", "worker-1"]
    assert len(recorder.of("worker_lost")) == 1
    result = run_training(counting_config(store, tmp_path))
    assert_learned_exactly(tmp_path, times=result.epoch + 1)


def test_a_slow_worker_takes_fewer_chunks(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=400, block_size=100)
    recorder = Recorder()
    slow: list[int] = []

    def slow_down(event: dict) -> None:
        pid = pid_of(recorder, event["session"])
        slow[:] = slow or [event["session"]]
        if event["session"] == slow[0]:  # stopped for a while at every chunk it finishes
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)

    for nth in range(1, 200):
        recorder.when("chunk", nth, slow_down)
    run_training(config(store, tmp_path / "run", commit_every_chunks=80), [recorder])
    chunks = Counter(event["session"] for event in recorder.of("chunk"))
    assert len(chunks) == 2
    assert chunks.total() == 80
    assert chunks[slow[0]] < 40
    assert weights(tmp_path / "run")["model.counts"].eq(1).all()


def test_a_worker_whose_main_thread_hangs_is_killed_and_the_others_go_on(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    hang = {
        "PENSTOCK_FAULT": "train.after_step|*|3",
        "PENSTOCK_FAULT_ONCE": str(tmp_path / "once"),
        "PENSTOCK_FAULT_HOW": "hang",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hang.items():
            patch.setenv(name, value)
        run_training(config(store, tmp_path / "run", stall_timeout_s=8.0), [recorder])
    assert [event["reason"] for event in recorder.of("worker_lost")] == ["no step for 8 s, killed"]
    assert_learned_exactly(tmp_path / "run")


def test_the_outer_step_is_plain_averaging_unless_asked_otherwise() -> None:
    base, merged = {"model.w": torch.tensor([1.0])}, {"model.w": torch.tensor([0.1]), "optimizer.0.m": torch.ones(1)}
    assert outer_step(base, merged, learning_rate=1.0, momentum=0.0) is merged


def test_the_outer_step_is_nesterovs() -> None:
    weight, speed = 1.0, 0.0
    state = {"model.w": torch.tensor([weight], dtype=torch.float64)}
    for change in (0.5, -0.25, 0.125):
        merged = {"model.w": state["model.w"] + change}
        state = outer_step(state, merged, learning_rate=0.7, momentum=0.9)
        speed = 0.9 * speed + change
        weight += 0.7 * (change + 0.9 * speed)
        assert state["model.w"].item() == pytest.approx(weight, rel=1e-12)
        assert state["outer.model.w"].item() == pytest.approx(speed, rel=1e-12)


def test_a_resumed_run_goes_on_with_its_outer_momentum(store: Path, tmp_path: Path) -> None:
    def train(name: str, *steps: int) -> dict[str, torch.Tensor]:
        settings = {"model": "tiny", "merge": "mean", "outer_momentum": 0.9, "outer_learning_rate": 0.7}
        for total in steps:
            run_training(config(store, tmp_path / name, workers=1, steps=total, commit_every_chunks=1, **settings))
        last = RunFolder(tmp_path / name).ledger.last_commit()
        assert last is not None
        return load_file(tmp_path / name / "checkpoints" / last.checkpoint_id / "optimizer.safetensors") | weights(
            tmp_path / name
        )

    # A commit comes with every chunk: stopping where one ends changes no round.
    per_chunk = _steps_by_chunk(store, tmp_path / "counted")
    stop_at = sum(per_chunk[:2])
    whole, resumed = train("whole", stop_at + per_chunk[2]), train("resumed", stop_at, stop_at + per_chunk[2])
    assert any(name.startswith("outer.") for name in whole)
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole if name != "rng.torch")


def _steps_by_chunk(store: Path, run_dir: Path) -> list[int]:
    recorder = Recorder()
    run_training(counting_config(store, run_dir), [recorder])
    return list(Counter((event["block_id"], event["chunk_id"]) for event in recorder.of("step")).values())

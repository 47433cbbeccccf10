"""Ranks as users start them: by `penstock train --ddp`, or by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from equipment.hooks import Recorder
from equipment.processes import run
from equipment.ranks import wait_for_steps
from equipment.training import assert_learned_exactly, counting_config
from penstock.errors import ConfigError, TrainError
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.run import run_training


def config(store: Path, run_dir: Path, **changes: object) -> TrainingConfig:
    return counting_config(store, run_dir, **{"ddp": True, "workers": 2, "commit_every_s": 1e-9, **changes})


def pid_of_rank(rank: int) -> int:
    """The child of this process that is a rank of this number."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} is there")


def arguments(store: Path, run_dir: Path) -> list[str]:
    words = ["train", "--dataset-file", str(store), "--run-dir", str(run_dir), "--model", "counting", "--merge", "sum"]
    return [*words, "--vocab-size", "300", "--batch-size", "3", "--max-seq-len", "16", "--ddp"]


def test_a_job_whose_rank_dies_is_started_again_as_often_as_asked(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    for nth in (5, 12):
        recorder.when("step", nth, lambda _: os.kill(pid_of_rank(1), signal.SIGKILL))
    told = r"rank 1 of 2 \(pid \d+\) has ended \(killed by signal 9\).*run the same command again"
    with pytest.raises(TrainError, match=told):
        run_training(config(store, tmp_path, iterate=True, respawn=1), [recorder])
    assert [event["generation"] for event in recorder.of("run_started")] == [1, 2]
    result = run_training(config(store, tmp_path, ddp=False, workers=1))
    assert result.reason == "epoch"
    assert_learned_exactly(tmp_path, times=result.epoch + 1)


def test_a_stopped_rank_is_killed_in_time(store: Path, tmp_path: Path) -> None:
    recorder = Recorder().when("step", 5, lambda _: os.kill(pid_of_rank(1), signal.SIGSTOP))
    with pytest.raises(TrainError, match=r"rank 1 of 2 .*silent for 5 s"):
        run_training(config(store, tmp_path, iterate=True, rank_timeout_s=5.0), [recorder])


def test_what_cannot_work_is_told_as_it_is(store: Path, tmp_path: Path) -> None:
    run_training(config(store, tmp_path, ddp=False, workers=1, plan="strided", steps=1))
    with pytest.raises(TrainError, match="was begun with other settings: batch_size: got 5, expected 2"):
        run_training(config(store, tmp_path, batch_size=5, respawn=3))
    with pytest.raises(ConfigError, match="workers"):
        run_training(config(store, tmp_path, workers=0))


def test_torchrun_trains_one_run_with_all_its_ranks(store: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*torchrun, "-m", "penstock", *arguments(store, tmp_path)], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.output
    assert done.output.count("stopped: the epoch is complete") == 1
    assert_learned_exactly(tmp_path)


def test_a_signal_to_the_command_stops_the_ranks_it_started_and_commits(store: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", *arguments(store, tmp_path), "--workers", "2", "--iterate"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_steps(tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "asked to stop; committed first" in output
    events = list(RunFolder(tmp_path).events())
    steps = sum(event["event"] == "step" for event in events)
    assert (events[-1]["reason"], events[-1]["total_steps"]) == ("signal", steps)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""

"""Ways to stop, each for one worker, for several and for ranks: committed first, with the reason told."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equipment.processes import pickled, python
from equipment.ranks import PATIENCE_S, wait_for_steps
from equipment.training import assert_learned_exactly, counting_config, start_training
from penstock.cli.main import app
from penstock.observe.run_folder import RunFolder
from penstock.train.run import run_training

MODES = {
    "alone": {},
    "workers": {"parallel_independent": True, "workers": 2},
    "ranks": {"ddp": True, "workers": 2},
}
BLOCKED = """
import pickle, sys, time
from penstock.train.run import run_training
class Blocks:
    def on_event(self, event):
        if event["event"] == "step":
            print("blocked", flush=True)
            time.sleep(600)
if __name__ == "__main__":
    run_training(pickle.loads(bytes.fromhex(sys.argv[1])), [Blocks()])
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_file_ends_a_training_committed_and_is_gone(store: Path, tmp_path: Path, mode: str) -> None:
    process = start_training(counting_config(store, tmp_path, iterate=True, commit_every_s=60.0, **MODES[mode]))
    wait_for_steps(tmp_path, 3)
    done = CliRunner().invoke(app, ["stop", str(tmp_path)])
    assert done.exit_code == 0, done.output
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert not (tmp_path / "stop").exists()
    events = list(RunFolder(tmp_path).events())
    steps = sum(event["event"] == "step" for event in events)
    assert (events[-1]["event"], events[-1]["reason"], events[-1]["total_steps"]) == ("run_stopped", "file", steps)
    (tmp_path / "stop").touch()  # of somebody who came too late: not meant for the next one
    epochs = events[-1]["epoch"] + 1
    assert run_training(counting_config(store, tmp_path)).reason == "epoch"
    assert_learned_exactly(tmp_path, times=epochs)


def test_a_run_that_is_not_under_way_cannot_be_stopped_or_joined(store: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, tmp_path, steps=2))
    for command in ("stop", "join"):
        done = CliRunner().invoke(app, [command, str(tmp_path)])
        assert done.exit_code == 1
        assert "no training is under way" in str(done.exception)
        assert not (tmp_path / command).exists()


@pytest.mark.parametrize("mode", ["alone", "ranks"])
def test_a_second_signal_ends_at_once(store: Path, tmp_path: Path, mode: str) -> None:
    config = counting_config(store, tmp_path, iterate=True, **MODES[mode])
    process = subprocess.Popen(python(BLOCKED, pickled(config)), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "one signal lets the step be finished"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    process.stdout.close()
    assert run_training(counting_config(store, tmp_path)).reason == "epoch"

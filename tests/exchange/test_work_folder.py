"""A work folder is one process's at a time, and a killed one gives it back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from equipment.forks import ended, start_process
from exchange.local_run import LocalRun
from penstock.errors import StorageBusy
from penstock.exchange.aggregator import Aggregator
from penstock.exchange.miner import Miner
from penstock.exchange.validator import Validator
from penstock.exchange.work_folder import hold
from penstock.train.stopping import StopRequest

Role = Callable[[LocalRun, Path, StopRequest], Aggregator | Miner | Validator]
ROLES: dict[str, Role] = {
    "miner a": lambda run, work, stop: Miner(run.opened, "a", work, stop=stop, poll_s=0.02),
    "validator validator": lambda run, work, stop: Validator(run.opened, work=work, stop=stop, poll_s=0.02),
    "aggregator": lambda run, work, stop: Aggregator(run.opened, work=work, stop=stop, poll_s=0.02),
}


@pytest.mark.parametrize("name", ROLES)
def test_a_second_process_in_a_work_folder_is_refused_and_told_who_holds_it(tmp_path: Path, name: str) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2, window_s=3600.0)
    work, stop, stopped = tmp_path / "work", StopRequest(), StopRequest()
    stopped.set()
    thread = threading.Thread(target=ROLES[name](run, work, stop).run)
    thread.start()
    try:
        wait_for(work / "metrics.jsonl")
        with pytest.raises(StorageBusy) as error:
            ROLES[name](run, work, stopped).run()
        assert f"work is in use by process {os.getpid()} for {name} of run 'run'" in str(error.value)
    finally:
        stop.set()
        thread.join(60)
    ROLES[name](run, work, stopped).run()
    assert not list(work.glob("*lock*"))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hold_for_ever(work: Path) -> None:
    with hold(work, "miner a", "run"):
        (work / "holding").touch()
        time.sleep(600)


def test_a_killed_process_holds_its_work_folder_no_longer(tmp_path: Path) -> None:
    process = start_process(hold_for_ever, tmp_path)
    try:
        wait_for(tmp_path / "holding")
        with (
            pytest.raises(StorageBusy, match=f"in use by process {process.pid} for miner a of run 'run'"),
            hold(tmp_path, "miner a", "run"),
        ):
            pass
    finally:
        process.kill()
        ended(process, 60)
    with hold(tmp_path, "miner a", "run"):
        pass

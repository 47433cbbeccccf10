"""Hours of random kills, stops and resumes, as long as one likes: `make soak`, PENSTOCK_SOAK_S seconds."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from equipment.training import assert_learned_exactly, counting_config, start_training
from penstock.observe.run_folder import RunFolder


def processes_of(pid: int | None) -> list[int]:
    """A training and its workers, as far as they are there."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []
    return [pid or 0, *map(int, children)]


@pytest.mark.soak
def test_random_kills_for_a_while_lose_and_repeat_nothing(store: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_SOAK_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    deadline = time.monotonic() + float(os.environ.get("PENSTOCK_SOAK_S", "300"))
    rounds = 0
    while time.monotonic() < deadline:
        run_dir = tmp_path / f"run-{rounds}"
        for _ in range(chance.randint(1, 6)):
            workers = chance.randint(1, 4)
            changes = {"parallel_independent": workers > 1, "workers": workers, "session_timeout_s": 5.0}
            process = start_training(
                counting_config(store, run_dir, commit_every_chunks=chance.randint(1, 6), **changes)
            )
            process.join(chance.uniform(0.2, 6.0))
            victims = processes_of(process.pid)
            if process.is_alive() and victims:
                os.kill(chance.choice(victims), chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]))
                process.join(chance.uniform(0.0, 3.0))
            process.kill()
            process.join()
        process = start_training(counting_config(store, run_dir))
        process.join(120)
        assert process.exitcode == 0, f"seed {seed}, round {rounds}: the last resume did not end well"
        assert_learned_exactly(run_dir)
        assert not list(RunFolder(run_dir).path.glob("replicas/*")), f"seed {seed}, round {rounds}: something was left"
        rounds += 1
    assert rounds

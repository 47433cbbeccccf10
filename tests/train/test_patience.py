"""What rank 0 does for all may take far longer than ranks wait for one another; a rank 0 that is gone may not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from equipment.forks import start_process
from equipment.ranks import PATIENCE_S, exit_codes, meeting_place
from equipment.training import counting_config
from penstock.errors import RankLost
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.evaluation import Evaluated, Evaluation
from penstock.train.run import run_as_rank
from penstock.train.stopping import StopRequest
from penstock.train.trainer import Trainer

TIMEOUT_S = 4.0
EVALUATION_S = 10.0
EVALUATING = "evaluating"
"""A file in the run's folder, while rank 0 is at it."""


def rank(config: TrainingConfig, environment: dict[str, str]) -> None:
    """One rank of a job whose evaluation takes its time; notes when it made progress, and what it failed with."""
    os.environ.update(environment)
    run_dir, progress = Path(config.run_dir), list[float]()

    def evaluate(self: Evaluation, trainer: Trainer, stop: Callable[[], bool] = lambda: False) -> Evaluated:
        (run_dir / EVALUATING).touch()
        began = time.monotonic()
        while time.monotonic() < began + EVALUATION_S and not stop():
            time.sleep(0.1)
        return Evaluated(loss=1.0, num_tokens=1, seconds=EVALUATION_S)

    Evaluation.evaluate = evaluate
    notes = run_dir / f"rank-{environment['RANK']}"
    try:
        run_as_rank(config, [], StopRequest(), lambda: progress.append(time.monotonic()))
    except RankLost as error:
        notes.write_text(str(error))
        raise
    notes.write_text(str(max(later - before for before, later in pairwise(progress))))


@contextmanager
def evaluating_ranks(store: Path, run_dir: Path, timeout_s: float) -> Iterator[list[BaseProcess]]:
    """Two ranks, of which the first evaluates at the end of three steps."""
    config = counting_config(store, run_dir, ddp=True, model="tiny", merge="mean", steps=3)
    config.eval_file, config.rank_timeout_s = str(store), timeout_s
    with meeting_place(2) as environments:
        processes = [start_process(rank, config, environment) for environment in environments]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()


def test_ranks_wait_for_an_evaluation_that_outlasts_every_time_out(store: Path, tmp_path: Path) -> None:
    with evaluating_ranks(store, tmp_path, TIMEOUT_S) as ranks:
        assert exit_codes(ranks) == [0, 0]
    assert [event["event"] for event in RunFolder(tmp_path).events()][-2:] == ["eval", "run_stopped"]
    longest = [float((tmp_path / f"rank-{number}").read_text()) for number in (0, 1)]
    assert max(longest) < EVALUATION_S, "who evaluates, or waits for it, is not to be taken for one that hangs"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_do_not_wait_for_a_rank_0_that_is_gone(store: Path, tmp_path: Path, number: signal.Signals) -> None:
    timeout_s = 2 * PATIENCE_S if number == signal.SIGKILL else TIMEOUT_S  # a death is noticed without
    with evaluating_ranks(store, tmp_path, timeout_s) as (first, other):
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / EVALUATING).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(first.pid or 0, number)
        other.join(PATIENCE_S)
        assert other.exitcode == 1
    assert "rank 1 of 2 has lost the others" in (tmp_path / "rank-1").read_text()

"""What ranks add up: loss and gradients of a global batch are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from equipment.ranks import PATIENCE_S, meeting_place
from equipment.training import counting_config
from penstock.train.run import run_training

SCRIPT = Path(__file__).parent / "rank_sums.py"


@pytest.fixture(scope="module")
def run_dir(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has begun, with a batch of 7 rows, so that no number of ranks but 1 shares it evenly."""
    folder = tmp_path_factory.mktemp("run")
    config = counting_config(store, folder, model="tiny", merge="mean", plan="strided", batch_size=7, max_seq_len=64)
    config.steps, config.max_grad_norm, config.vocab_size = 1, 0.0, 300
    run_training(config)
    return folder


def test_the_first_step_of_ranks_is_that_of_one_process(run_dir: Path, tmp_path: Path) -> None:
    for world in (1, 2, 3, 4):
        with meeting_place(world) as environments:
            started = [
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(run_dir), str(tmp_path)], env={**os.environ, **environment}
                )
                for environment in environments
            ]
            assert [process.wait(PATIENCE_S) for process in started] == [0] * world
    alone = load_file(tmp_path / "1-0.safetensors")
    largest = {"loss": 0.0, "gradient": 0.0}
    for world in (2, 3, 4):
        results = [load_file(tmp_path / f"{world}-{rank}.safetensors") for rank in range(world)]
        for found in results:
            assert found.keys() == alone.keys()
            assert all(found[name].equal(results[0][name]) for name in found), "the same bits on every rank"
        assert results[0]["tokens"] == alone["tokens"]
        for name, expected in alone.items():
            kind = "loss" if name == "loss" else "gradient"
            largest[kind] = max(largest[kind], float((results[0][name] - expected).abs().max()))
    assert largest["loss"] <= 1e-8
    assert largest["gradient"] <= 2.5e-5

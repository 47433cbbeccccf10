"""Ranks of a job as real processes that can be killed: as torchrun starts them, without an interpreter each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from equipment.training import start_training
from penstock.feed import DistributedLoader
from penstock.observe.run_folder import RunFolder
from penstock.storage import LocalStorage
from penstock.train.config import TrainingConfig
from penstock.train.parts import RunParts, embedded_ledger

PATIENCE_S = 120.0


@contextmanager
def meeting_place(world: int) -> Iterator[list[dict[str, str]]]:
    """Where so many ranks meet: the environment of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(world)
    ]


@contextmanager
def ranks_of(config: TrainingConfig, world: int) -> Iterator[list[BaseProcess]]:
    """A job under way; whoever is left when this ends is killed."""
    with meeting_place(world) as environments:
        processes = [start_training(config, environment) for environment in environments]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()


def exit_codes(processes: list[BaseProcess], timeout_s: float = PATIENCE_S) -> list[int | None]:
    """How ranks have ended; None of one that has not in time."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def train_as_ranks(config: TrainingConfig, world: int) -> None:
    """Run a job to its end."""
    with ranks_of(config, world) as processes:
        assert exit_codes(processes) == [0] * world


def batches_learned(run_dir: Path) -> list[list[int]]:
    """The samples that each step has learned, by the weights of a counting model that was committed at every step."""
    commits = RunFolder(run_dir).ledger.commits()
    assert [commit.total_steps for commit in commits] == list(range(len(commits))), "a commit a step"
    counts = [load_file(run_dir / "checkpoints" / commit.checkpoint_id / "model.safetensors") for commit in commits]
    return [
        torch.repeat_interleave((after["model.counts"] - before["model.counts"]).long()).tolist()
        for before, after in pairwise(counts)
    ]


def batches_planned(run_dir: Path, epochs: int = 1) -> list[list[int]]:
    """The same, as one loader that has the world to itself hands them out."""
    storage = LocalStorage(run_dir)
    loader: DistributedLoader = RunParts(storage, embedded_ledger(storage)).loader(0, 1)
    return [sorted(batch["sample_ids"].tolist()) for _ in range(epochs) for batch in loader]


def wait_for_steps(run_dir: Path, steps: int) -> None:
    """Wait until a run has told of so many steps."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        told = list(RunFolder(run_dir).events()) if (run_dir / "config.toml").exists() else []
        if sum(event["event"] == "step" for event in told) >= steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"{run_dir} has not come to {steps} steps within {PATIENCE_S} s")

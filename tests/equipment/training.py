"""Small real training runs, in processes that can be killed."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import orjson
from safetensors.torch import load_file
from torch import Tensor

from equipment.forks import ended, start_process
from equipment.prepared import WaitingWorkers, become, workers_started_by
from penstock import faults
from penstock.blocks import ingest
from penstock.observe.proof import prove
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.run import run_training

SAMPLES = 60


def make_store(folder: Path, samples: int = SAMPLES, block_size: int = 25) -> Path:
    """A block store of short texts, some of them empty, some longer than a sequence."""
    rows = [{"text": f"sample {number} says " + "word " * ((number * 7) % 23)} for number in range(samples)]
    for number in range(0, samples, 11):
        rows[number]["text"] = ""
    raw = folder / "raw.jsonl"
    raw.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    ingest(raw, folder / "store", block_size)
    return folder / "store"


def counting_config(store: Path, run_dir: Path, **changes: object) -> TrainingConfig:
    """Twelve chunks in three blocks, a commit every three chunks; the weights count how often samples were learned."""
    config = TrainingConfig(
        dataset_file=str(store),
        run_dir=str(run_dir),
        model="counting",
        merge="sum",
        vocab_size=300,
        dataset_chunk_size=5,
        batch_size=2,
        max_seq_len=16,
        commit_every_chunks=3,
        session_timeout_s=20.0,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def start_training(
    config: TrainingConfig, environment: dict[str, str] | None = None, *, group: bool = False, prepared: bool = True
) -> BaseProcess:
    """Begin a training in a process of its own; by choice it leads a process group, or its workers are prepared."""
    return start_process(_train, config, environment or {}, group, prepared)


def train_in_process(config: TrainingConfig, environment: dict[str, str] | None = None, timeout_s: float = 120) -> int:
    """Run a training in a process of its own; returns its exit code, -9 for a killed one."""
    return ended(start_training(config, environment), timeout_s)


def _train(config: TrainingConfig, environment: dict[str, str], group: bool, prepared: bool) -> None:
    if group:
        os.setpgid(0, 0)
    os.environ.update(environment)
    starts_others = config.parallel_independent or (config.ddp and "RANK" not in environment)
    workers = WaitingWorkers(config.workers if starts_others and prepared else 0)
    faults.arm()
    with workers_started_by(workers.start):
        run_training(config)


@contextmanager
def forked_workers() -> Iterator[None]:
    """While inside, trainings in this process have workers that are quick to start."""
    with workers_started_by(_Forked):
        yield


class _Forked:
    def __init__(self, module: str, environment: Mapping[str, str], number: int) -> None:
        with socket.socket(fileno=os.dup(number)) as line:
            self._process = start_process(_be_worker, module, dict(environment), line)
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _be_worker(module: str, environment: dict[str, str], line: socket.socket) -> None:
    become(module, environment, line.detach())


def weights(run_dir: Path) -> dict[str, Tensor]:
    """The weights of the last commit."""
    last = RunFolder(run_dir).ledger.last_commit()
    assert last is not None
    return load_file(run_dir / "checkpoints" / last.checkpoint_id / "model.safetensors")


def assert_learned_exactly(run_dir: Path, times: int = 1) -> None:
    """Every sample was learned that often: by the weights themselves, and by the audit."""
    counts = weights(run_dir)["model.counts"]
    wrong = {index: count for index, count in enumerate(counts.tolist()) if count != times}
    assert not wrong, f"samples not learned {times} times: {wrong}"
    audits = prove(RunFolder(run_dir))
    assert [audit.holds for audit in audits] == [True] * times, audits

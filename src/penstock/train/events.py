"""What happens in a run, as plain dicts of known fields: hooks show them, metrics.jsonl keeps them (docs/events.md).

Every event has `event`, `time` (seconds since 1970) and `generation`: a step of a generation that crashed before its
commit was void, and the next generation's steps stand in its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypedDict

import orjson

from penstock.errors import ConfigError, StorageError

Event = dict[str, Any]


class RunStarted(TypedDict):
    """A run begins, or goes on from its last commit."""

    run_dir: str
    dataset: str
    total_samples: int
    total_blocks: int
    samples_per_block: int
    dataset_chunk_size: int
    workers: int
    """Or ranks."""
    plan: str
    """claims or strided."""
    devices: list[str]
    precision: str
    model: str
    steps: int | None
    """Where it is to stop, if anywhere."""
    iterate: bool
    total_steps: int
    """Made so far, by the last commit."""
    next_step: int
    samples_committed: int
    """Of the current epoch."""
    epoch: int


class Planned(TypedDict):
    """What a streamed run will need, worked out before it begins."""

    parameters: int
    layers: int
    host_bytes: int
    """All ranks of a machine together."""
    host_free_bytes: int
    device_bytes: int
    """Of each device, without layers that stay there."""
    device_budget_bytes: int | None
    """None where the host computes."""
    residents: int
    """Units that stay on the device: what is around the layers first, then layers."""
    compute_s: float
    """Seconds a step by what takes them, each by itself:"""
    link_s: float
    optimizer_s: float
    step_s: float
    """the longest of them,"""
    binds: str
    """and which that is: compute, link or optimizer."""


class WorkerStarted(TypedDict):
    """A worker has joined."""

    worker: str
    session: int
    pid: int
    ranks: int
    """How many processes it is made of: a job of ranks is one worker."""


class Step(TypedDict):
    """An optimizer step, or a batch that was skipped for a loss that is not a number."""

    step: int
    """Its number in the run, from 1."""
    loss: float | None
    """Mean over the batch's tokens; None where it is not a number."""
    num_tokens: int
    """Tokens learned from."""
    learning_rate: float
    grad_norm: float | None
    """Before clipping; None where it is not a number."""
    skipped: bool
    """The batch counts as seen and the weights are what they were."""
    step_s: float
    wait_s: float
    """How long the step waited for its batch."""
    tokens_per_s: float
    """Of this step and its wait."""
    mfu: float | None
    """The share of the devices' peak that this step's arithmetic was; None but for streamed runs on known devices."""
    worker: str
    session: int
    epoch: int
    batch: int | None
    """Which one of the epoch; None where chunks are claimed."""
    block_id: int | None
    """Of its chunk; None on the strided plan, whose batches come from anywhere,"""
    chunk_id: int | None
    start_offset: int | None
    """Sequences of the chunk before this batch."""
    samples: list[list[int]]
    """Ids of which it saw some token: ranges, from and to. Empty on the strided plan: `penstock audit --step` asks the
    plan."""
    samples_done: int
    """Samples whose last token it saw."""


class Chunk(TypedDict):
    """A chunk is learned to its end."""

    worker: str
    session: int
    epoch: int
    block_id: int
    chunk_id: int
    samples: int


class Committed(TypedDict):
    """A checkpoint and the ledger's word on what it has learned are durable."""

    checkpoint_id: str
    total_steps: int
    epoch: int
    samples: int
    workers: list[str]
    commit_s: float


class Eval(TypedDict):
    """A committed state was evaluated."""

    total_steps: int
    loss: float | None
    """Mean over tokens."""
    perplexity: float | None
    num_tokens: int
    eval_s: float


class WorkerLost(TypedDict):
    """A worker died or was fenced; what it had not committed went back."""

    worker: str
    session: int
    pid: int
    reason: str


class RunStopped(TypedDict):
    """The run has ended in order."""

    reason: str
    """steps, epoch, signal or file."""
    total_steps: int
    epoch: int


EVENTS: dict[str, type] = {
    "run_started": RunStarted,
    "plan": Planned,
    "worker_started": WorkerStarted,
    "step": Step,
    "chunk": Chunk,
    "commit": Committed,
    "eval": Eval,
    "worker_lost": WorkerLost,
    "run_stopped": RunStopped,
}
"""Every kind of event and its fields."""


class Hook(Protocol):
    """Sees every event of a run, in the process that was asked to run it."""

    def on_event(self, event: Event) -> None: ...


class Events:
    """Stamps events and hands them to the hooks."""

    def __init__(self, hooks: Iterable[Hook], generation: int) -> None:
        self._hooks = list(hooks)
        self.generation = generation

    def emit(self, name: str, **fields: Any) -> None:
        self.forward({"event": name, "time": round(time.time(), 3), "generation": self.generation, **fields})

    def forward(self, event: Event) -> None:
        for hook in self._hooks:
            hook.on_event(event)


class MetricsFile:
    """Appends every event to a JSONL file, a line each, never rewriting what is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            if self._file.tell():
                self._file.seek(-1, 2)
                if self._file.read(1) != b"\n":  # a writer was killed in mid-line
                    self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(
                f"the metrics file {path} cannot be written: {error.strerror or error}: "
                "mend that, or name another with --log-file"
            ) from error

    def on_event(self, event: Event) -> None:
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        try:
            while line:  # a disk that fills up may take part of it
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            raise StorageError(
                f"the metrics file {self._path} cannot be written: {error.strerror or error}: "
                "mend that and run the same command again; the last commit is kept"
            ) from error

    def close(self) -> None:
        self._file.close()

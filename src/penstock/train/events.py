"""What happens in a run, as plain dicts: hooks show them, metrics.jsonl keeps them.

    run_started      run_dir, dataset, total_samples, total_blocks, samples_per_block, dataset_chunk_size, workers,
                     total_steps, next_step, samples_committed, epoch
    worker_started   worker, session, pid
    step             step, loss, num_tokens, step_s, worker, session, epoch, block_id, chunk_id,
                     start_offset, samples (ranges of the ids of which it saw some token, from and to)
    chunk            worker, session, epoch, block_id, chunk_id, samples
    commit           checkpoint_id, total_steps, epoch, samples, workers, commit_s
    worker_lost      worker, session, pid, reason
    run_stopped      reason, total_steps, epoch

Every event has `event`, `time` (seconds since 1970) and `generation`: a step of a generation that crashed before its
commit was void, and the next generation's steps stand in its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import orjson

from penstock.errors import ConfigError, StorageError

Event = dict[str, Any]


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
                f"the metrics file {path} cannot be written: {error.strerror or error}: name another with --log-file"
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

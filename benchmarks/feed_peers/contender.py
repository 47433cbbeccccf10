"""One measurement of one contender, in a process that does nothing else. Prints one line of JSON.

    python contender.py NAME ACTION TASK

NAME is a module ``of_NAME`` beside this file, TASK a JSON object. Each module offers what it can of:

    prepare(task)      write the rows in the library's own format
    open_rows(task)    a `Feed` of batches of those rows, shuffled; with `state`, one that goes on from there
    open_texts(task)   batches of packed ids from raw text, nothing prepared

A feed is iterated once an epoch and tells where it stands. Nothing heavier than numpy is imported here: the time from
the start of the process to the first batch is one of the things that are measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Task = dict[str, Any]


class Feed(Protocol):
    """What a contender's module hands out."""

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> Any:
        """Where it stands, as its library tells it; to be pickled."""
        ...


class Touch:
    """Copies a batch into a buffer of its own type that stays: what moving it to a device would do to every byte."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint16)
        self.count = 0

    def __call__(self, batch: Any) -> None:
        array = np.asarray(batch)
        if self._buffer.dtype != array.dtype or self._buffer.shape != array.shape:
            self._buffer = np.empty(array.shape, dtype=array.dtype)
        np.copyto(self._buffer, array)
        self.count += array.size


def rate(module: Any, task: Task) -> dict[str, Any]:
    """Tokens a second between the first batch and the last, over as many epochs as `seconds` take."""
    feed = module.open_rows(task)
    touch = Touch()
    began = time.perf_counter()
    first = began
    while True:
        for number, batch in enumerate(feed):
            touch(batch)
            now = time.perf_counter()
            if first == began:
                first, touch.count = now, 0  # the start is another figure
            if number % 8 == 0 and now - first > task["seconds"]:
                break
        now = time.perf_counter()
        if now - first > task["seconds"]:
            return {"tokens_per_s": touch.count / (now - first), "dtype": str(touch._buffer.dtype)}


def cold(module: Any, task: Task) -> dict[str, Any]:
    """Tokens a second from raw text to packed batches, from opening to the last batch."""
    touch = Touch()
    began = time.perf_counter()
    first_s = 0.0
    for batch in module.open_texts(task):
        touch(batch)
        first_s = first_s or time.perf_counter() - began
    elapsed = time.perf_counter() - began
    return {"tokens_per_s": touch.count / elapsed, "tokens": touch.count, "seconds": elapsed, "first_batch_s": first_s}


def first(module: Any, task: Task) -> dict[str, Any]:
    """When the first batch was there, on the clock that all processes share."""
    touch = Touch()
    for batch in module.open_rows(_with_state(task)):
        touch(batch)
        break
    return {"at": time.perf_counter(), "torch": "torch" in sys.modules, "tokens": touch.count}


def state(module: Any, task: Task) -> dict[str, Any]:
    """Go to a share of the epoch and store the state there, as a checkpoint would."""
    import pickle

    feed = module.open_rows(task)
    wanted = int(task["share"] * task["batches"])
    stored: Any = None
    for number, _ in enumerate(feed, start=1):
        if number == wanted:
            stored = feed.state()
            break
    Path(task["state_file"]).write_bytes(pickle.dumps(stored))
    return {"batches": wanted, "state_bytes": len(pickle.dumps(stored))}


def memory(module: Any, task: Task) -> dict[str, Any]:
    """Peak memory of one epoch in MB: all of it, and without the pages of mapped files, which are the kernel's."""
    touch = Touch()
    anon = 0
    for number, batch in enumerate(module.open_rows(task)):
        touch(batch)
        if number % 32 == 0:
            anon = max(anon, _status("RssAnon"))
    return {"rss_mb": _status("VmHWM") / 1024, "anon_mb": max(anon, _status("RssAnon")) / 1024, "tokens": touch.count}


def rank(module: Any, task: Task) -> dict[str, Any]:
    """One rank of a run: writes down the ids of every step; at the step of the checkpoint stores its state, and goes on
    until it is killed."""
    import pickle

    feed = module.open_rows(_with_state(task))
    steps = 0
    with Path(task["log_file"]).open("w") as log:
        for batch in feed:
            log.write(" ".join(map(str, np.asarray(batch)[:, 0].tolist())) + "\n")
            steps += 1
            if steps == task.get("stop_step"):
                log.flush()
                part = Path(task["store_file"] + ".part")
                part.write_bytes(pickle.dumps(feed.state()))
                part.rename(task["store_file"])
            if steps >= task.get("stop_step", 1 << 60):
                log.flush()
                time.sleep(0.01)
    return {"steps": steps}


def prepare(module: Any, task: Task) -> dict[str, Any]:
    module.prepare(task)
    return {}


def _with_state(task: Task) -> Task:
    if not task.get("state_file"):
        return task
    import pickle

    # Written by this benchmark a moment ago.
    return {**task, "state": pickle.loads(Path(task["state_file"]).read_bytes())}  # noqa: S301


def _status(name: str) -> int:
    """A figure of this process in KB."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def main() -> None:
    name, action, task = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    actions = {
        "rate": rate,
        "cold": cold,
        "first": first,
        "state": state,
        "memory": memory,
        "rank": rank,
        "prepare": prepare,
    }
    module = import_module(f"of_{name}")
    told = actions[action](module, task) if action in actions else getattr(module, action)(task)
    print("\n" + json.dumps(told), flush=True)
    if action in ("first", "rate", "state"):
        sys.stdout.flush()
        import os

        os._exit(0)  # workers and threads of an epoch that is not at its end have nothing more to say


if __name__ == "__main__":
    main()

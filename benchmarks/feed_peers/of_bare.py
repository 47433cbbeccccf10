"""The limit: a memory map of the rows, a random permutation of them, eight at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class Bare:
    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._rows = np.memmap(task["rows"], dtype=np.uint16, mode="r").reshape(-1, task["width"])

    def __iter__(self) -> Iterator[Any]:
        rows, batch = self._rows, self._task["batch"]
        order = np.random.default_rng(self._task["seed"]).permutation(len(rows))
        for start in range(0, len(order), batch):
            yield rows[order[start : start + batch]]

    def state(self) -> Any:
        return None


def open_rows(task: dict[str, Any]) -> Bare:
    return Bare(task)


def opened(task: dict[str, Any]) -> dict[str, Any]:
    """numpy, and the files that the loader reads: opened, and a batch's worth of bytes of them touched."""
    import time

    for file in task["files"]:
        data = np.memmap(file, dtype=np.uint8, mode="r")
        data[: task["batch"] * task["width"] * 2].copy()
    return {"at": time.perf_counter()}


def indices(task: dict[str, Any]) -> dict[str, Any]:
    """Indices of numpy's own permutation a second, on one core: an array of all of them, which a plan does not have."""
    import os
    import time

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    generator = np.random.default_rng(7)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < task["seconds"]:
        count += len(generator.permutation(task["samples"]))
    return {"indices_per_s": count / (time.perf_counter() - began)}

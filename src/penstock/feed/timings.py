"""Where a feed's time goes: what its thread did, and how long its consumer had to wait."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

Work = Literal["fetch", "decode", "tokenise", "pack"]
WORK: tuple[Work, ...] = ("fetch", "decode", "tokenise", "pack")
_REMEMBERED = 10_000


class Timings:
    """Seconds by kind of work, and the consumer's last waits. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._waits: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._waited_s = 0.0
        self.batches = 0
        """Handed out; counted by the consumer's thread alone."""
        self._began = time.perf_counter()

    def __reduce__(self) -> tuple[object, ...]:
        return Timings, ()  # each process counts for itself

    @contextmanager
    def of(self, work: Work) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[work] += time.perf_counter() - began

    def waited(self, seconds: float) -> None:
        """The consumer waited so long for the next batch, or for what the next batches are made of."""
        with self._lock:
            self._waits.append((self.batches, seconds))
            self._waited_s += seconds

    def _by_batch(self) -> np.ndarray:
        """The wait for each of the last batches; nothing for those that were there already."""
        first = max(0, self.batches - _REMEMBERED)
        waits = np.zeros(max(1, self.batches - first))
        for batch, seconds in self._waits:
            if first <= batch < self.batches:
                waits[batch - first] += seconds
        return waits

    def report(self) -> dict[str, float]:
        """How long the consumer waited (of each batch, and as a share of all time), and what for: the time of the
        feed's own work by kind. Waiting with none of them behind it is the queue's."""
        with self._lock:
            waits = self._by_batch()
            elapsed = max(1e-9, time.perf_counter() - self._began)
            return {
                "batches": self.batches,
                "wait_p50_s": float(np.percentile(waits, 50)),
                "wait_p99_s": float(np.percentile(waits, 99)),
                "wait_share": self._waited_s / elapsed,
                **{f"{work}_s": self._seconds[work] for work in WORK},
                "queue_s": max(0.0, self._waited_s - sum(self._seconds.values())),
            }

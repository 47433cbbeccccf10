"""Threads for requests that their caller may stop waiting for.

A request of obstore's cannot be called off. So it runs in a thread of its own, and whoever asked waits for its report
for as long as that makes sense. The threads are daemons: one that waits for a silent server keeps no process from
ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 5.0
"""A thread with nothing to do for so long ends."""


class Lanes:
    """Runs jobs at once, each in a thread that is free or a new one; how many there are is the callers' business.

    Jobs see to their own errors. A process that was forked must not use one of its parent's: its threads stayed there.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = 0
        """Threads that wait, less the jobs that wait for one of them."""
        self.count = 0
        """Threads that live."""

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                self._jobs.put(job)
                return
            self.count += 1
        try:
            threading.Thread(target=self._work, args=([job],), name="penstock lane", daemon=True).start()
        except BaseException:
            with self._lock:
                self.count -= 1
            raise

    def _work(self, jobs: list[Callable[[], None]]) -> None:
        """Do a job, and those that come after it. Nothing of a job is held while waiting for the next."""
        while jobs:
            jobs.pop()()
            with self._lock:
                self._free += 1
            while not jobs:
                try:
                    jobs.append(self._jobs.get(timeout=self._idle_s))
                except queue.Empty:
                    with self._lock:
                        if self._free:  # else a job is on its way to one of us
                            self._free -= 1
                            self.count -= 1
                            return

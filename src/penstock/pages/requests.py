"""Reading several ranges at a time: so many requests and no more, however many pages are being loaded."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.errors import ConfigError, PenstockError

T = TypeVar("T")

_LOOK_S = 5.0


class Requests:
    """Does jobs in threads, `limit` at a time at most, over all who ask. Threads start when they are needed.

    A job alone is done by whoever asks, within the same limit. Closing ends the threads, each after the request it is
    at; they are daemons, so that a server that does not answer keeps no process from ending.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"MAX_CONCURRENT_REQUESTS={limit} asks for nothing: expected 1 or more")
        self._limit = limit
        self._pid = os.getpid()
        self._places = threading.Semaphore(limit)
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closing = False

    def all_of(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What each job gives, in order; the first error of any, once all have ended."""
        if len(jobs) == 1:
            with self._places:
                self._refuse_closed()
                return [jobs[0]()]
        results: list[Any] = [None] * len(jobs)
        errors: dict[int, BaseException] = {}
        left = threading.Semaphore(0)

        def run(place: int, job: Callable[[], T]) -> None:
            try:
                with self._places:
                    self._refuse_closed()
                    if not errors:  # what comes after a failure is of no use
                        results[place] = job()
            except BaseException as error:  # noqa: BLE001 - raised by who asked
                errors[place] = error
            finally:
                left.release()

        self._start(len(jobs))
        for place, job in enumerate(jobs):
            self._waiting.put(lambda place=place, job=job: run(place, job))
        for _ in jobs:
            while not left.acquire(timeout=_LOOK_S):
                self._refuse_closed()
        if errors:
            raise errors[min(errors)]
        return results

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> list[threading.Thread]:
        """Ask the threads to end; gives them, to wait for. A forked process has none, and a lock that nobody frees."""
        if self._pid != os.getpid():
            return []
        with self._lock:
            self._closing = True
            for _ in self._threads:
                self._waiting.put(None)
            return self._threads

    def _refuse_closed(self) -> None:
        if self._closing:
            raise PenstockError("the iteration has ended")

    def _start(self, more: int) -> None:
        with self._lock:
            self._refuse_closed()
            for _ in range(min(more, self._limit - len(self._threads))):
                thread = threading.Thread(target=self._work, name="penstock request", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            job()

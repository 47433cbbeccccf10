"""A thread that does what it is given, in order; what fails in it is raised where somebody waits."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

from penstock.errors import TrainError

_LOOK_AROUND_S = 1.0


class Background:
    """Given work by one thread; anybody may wait for it."""

    def __init__(
        self,
        name: str,
        *,
        begin: Callable[[], object] = lambda: None,
        idle: Callable[[], object] = lambda: None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """Begin the thread.

        Args:
            name: Of the thread.
            begin: Done first, in the thread.
            idle: Done in the thread when there is no more work for now; what is given is done only after it.
            on_failure: Told of the error that ends the thread.
        """
        self._begin = begin
        self._idle = idle
        self._on_failure = on_failure
        self._given = self._done = 0
        self._closed = False
        self._changed = threading.Condition()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # an interpreter that ends while a kernel runs in a thread aborts

    def give(self, work: Callable[[], None]) -> None:
        """Something to do, after everything given before."""
        self._raise_failure()
        self._require_running()
        self._given += 1
        self._work.put(work)

    def wait(self) -> None:
        """Until everything given is done."""
        given = self._given
        with self._changed:
            while self._done < given and self._failure is None:
                self._require_running()
                self._changed.wait(_LOOK_AROUND_S)
        self._raise_failure()

    def close(self) -> None:
        """End the thread, after what it was given."""
        atexit.unregister(self.close)
        self._closed = True
        self._work.put(None)
        self._thread.join(timeout=60)

    def _require_running(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise TrainError(f"the {self._thread.name} of a trainer that is closed is asked for")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._begin()
            waiting = 0
            while True:
                try:
                    work = self._work.get_nowait()
                except queue.Empty:
                    self._idle()
                    self._count(waiting)
                    waiting, work = 0, self._work.get()
                if work is None:
                    self._idle()
                    self._count(waiting)
                    return
                work()
                waiting += 1
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._on_failure(error)

    def _count(self, done: int) -> None:
        if done:
            with self._changed:
                self._done += done
                self._changed.notify_all()

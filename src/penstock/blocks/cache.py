"""The last few chunks in memory, bounded in bytes, and the next one on its way."""

from __future__ import annotations

import atexit
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from concurrent.futures import Future

_GOODBYE_S = 5.0
_backgrounds: WeakSet[_Background] = WeakSet()


@atexit.register
def _end_all() -> None:
    """End before the interpreter does, which a thread that comes back from C++ would turn into an abort."""
    ends_at = time.monotonic() + _GOODBYE_S
    for background in list(_backgrounds):
        background.end(max(0.0, ends_at - time.monotonic()))


class ChunkCache:
    """Chunks' bytes by key, the least recently used dropped first. Safe for threads.

    A chunk asked for by several threads is read once. One that is larger than the budget is read and not kept. An error
    is told to whoever asked, and the next one who asks reads again.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._reading: dict[Hashable, Future[bytes]] = {}
        self._background: _Background | None = None
        self.size_bytes = 0

    def get(self, key: Hashable, read: Callable[[], bytes]) -> bytes:
        """The chunk under `key`, read by `read` where it is not here."""
        from concurrent.futures import Future  # here, because opening a store must not wait for it

        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            future = self._reading.get(key)
            mine = future is None
            if future is None:
                future = self._reading[key] = Future()
        if mine:
            self._read(key, read, future)
        return future.result()

    def prefetch(self, key: Hashable, read: Callable[[], bytes]) -> None:
        """Begin to read a chunk in the background, unless it is here or on its way. Never raises: `get` will."""
        from concurrent.futures import Future

        with self._lock:
            if key in self._kept or key in self._reading:
                return
            future = self._reading[key] = Future()
            if self._background is None:
                self._background = _Background()
            self._background.submit(lambda: self._read(key, read, future))

    def close(self) -> None:
        """Forget everything and end the background thread; what waits for a dead network is not waited for long."""
        with self._lock:
            background, self._background = self._background, None
            self._kept.clear()
            self.size_bytes = 0
        if background is not None:
            background.end()

    def _read(self, key: Hashable, read: Callable[[], bytes], future: Future[bytes]) -> None:
        try:
            data = read()
        except BaseException as error:
            with self._lock:
                self._reading.pop(key, None)
            future.set_exception(error)
            raise
        with self._lock:
            self._reading.pop(key, None)
            self._keep(key, data)
        future.set_result(data)

    def _keep(self, key: Hashable, data: bytes) -> None:
        if len(data) > self._capacity_bytes:
            return
        self._kept[key] = data
        self.size_bytes += len(data)
        while self.size_bytes > self._capacity_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.size_bytes -= len(dropped)


class _Background:
    """A thread that reads ahead, one thing after the other. A process that ends waits for what it is at, but not for
    long: an executor's thread would be waited for as long as a server that does not answer is waited for."""

    def __init__(self) -> None:
        _backgrounds.add(self)
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock prefetch", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def end(self, timeout_s: float = _GOODBYE_S) -> None:
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with suppress(Exception):  # told to whoever asks for it
                task()

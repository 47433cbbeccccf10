"""Making the next things while the current one is used: one thread, a budget in bytes, no hang and no silent end."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from penstock.errors import PenstockError

T = TypeVar("T")

_LOOK_S = 5.0
"""How often whoever waits looks whether the other side is still there."""


_GOODBYE_S = 5.0
"""How long a process that ends waits for calls that are under way."""
_under_way: WeakSet[Soon[Any] | Prefetch[Any]] = WeakSet()


@atexit.register
def _end_all() -> None:
    """Let threads end before the interpreter does: one that comes back from C++ or Rust when there is none any more
    takes the process down with an abort. One that waits for a silent server is not waited for as long as that."""
    ends_at = time.monotonic() + _GOODBYE_S
    for each in list(_under_way):
        each.close(max(0.0, ends_at - time.monotonic()))


class Soon(Generic[T]):
    """A call that is under way in a thread of its own. A process that ends waits for it a little, not for long."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="penstock ahead", daemon=True)
        _under_way.add(self)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended, in whichever way."""
        self._thread.join()

    def close(self, timeout_s: float) -> None:
        """Wait for its end, for so long at most."""
        self._thread.join(timeout_s)

    def result(self) -> T:
        """What it returned, or raises what it raised; waits for it."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error


class Prefetch(Generic[T]):
    """Runs an iterator in a thread, ahead of its consumer by up to `budget_bytes`; at least by one item.

    An exception of the iterator reaches the consumer, behind the items that came before it. Closing ends the thread
    after the item it is at.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        budget_bytes: int,
        size_of: Callable[[T], int],
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self._items = items
        self._budget_bytes = budget_bytes
        self._size_of = size_of
        self._ready: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._closing = False
        self._changed = threading.Condition()
        self._on_wait = on_wait
        self._thread = threading.Thread(target=self._run, name="penstock feed", daemon=True)
        _under_way.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                began = time.perf_counter()
                while not self._ready and not self._ended:
                    self._changed.wait(_LOOK_S)
                    if not self._thread.is_alive() and not self._ended and not self._ready:
                        raise PenstockError("the feed's thread ended without a word: it may have been forked; spawn")
                if self._on_wait is not None:
                    self._on_wait(time.perf_counter() - began)
                if self._ready:
                    item, size = self._ready.popleft()
                    self._bytes -= size
                    self._changed.notify_all()
                elif self._error is not None:
                    raise self._error
                else:
                    return
            yield item

    def close(self, timeout_s: float = _LOOK_S) -> bool:
        """End the thread; what it has made is dropped. Says whether it has ended within the time."""
        with self._changed:
            self._closing = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._hand_over(item):
                    return
        except BaseException as error:  # noqa: BLE001 - told to the consumer
            self._error = error
        finally:
            with suppress(AttributeError, ValueError):
                self._items.close()  # pyright: ignore[reportAttributeAccessIssue] - where it is a generator
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _hand_over(self, item: T) -> bool:
        size = self._size_of(item)
        with self._changed:
            while self._ready and self._bytes + size > self._budget_bytes and not self._closing:
                self._changed.wait(_LOOK_S)
            if self._closing:
                return False
            self._ready.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

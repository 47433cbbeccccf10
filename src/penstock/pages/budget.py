"""A budget in bytes for pages that are loaded ahead, given out in the order in which they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.errors import PenstockError

_LOOK_S = 5.0


class ByteBudget:
    """Bytes for numbered pages. A page gets its bytes once every earlier one has got its own and there is room; one
    that is larger than the budget gets them while no other holds any. So the page that is waited for is never behind
    one that is not, and memory holds the budget or one page, whichever is more. Safe for threads."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._changed = threading.Condition()
        self._held: dict[int, int] = {}
        self._next = 0
        """The page whose turn it is."""
        self._passed: set[int] = set()
        """Later ones that will never take any."""
        self._closing = False
        self.largest = 0
        """The most that was held at a time."""

    def take(self, number: int, size_bytes: int) -> None:
        """Wait for a page's turn and for room."""
        with self._changed:
            while not self._closing and not (self._next == number and self._has_room(size_bytes)):
                self._changed.wait(_LOOK_S)
            if self._closing:
                raise PenstockError("the iteration has ended")
            self._held[number] = size_bytes
            self._advance()
            self._note()

    def claim(self, number: int) -> Callable[[int], None]:
        """`take` for a page, and `change` from the second call on."""
        is_held = False

        def claim(size_bytes: int) -> None:
            nonlocal is_held
            (self.change if is_held else self.take)(number, size_bytes)
            is_held = True

        return claim

    def change(self, number: int, size_bytes: int) -> None:
        """A page holds another number of bytes by now."""
        with self._changed:
            self._held[number] = size_bytes
            self._note()

    def give(self, number: int) -> None:
        """A page's bytes are free again; one that never took any loses its turn."""
        with self._changed:
            if self._held.pop(number, None) is None and number >= self._next:
                if number == self._next:
                    self._advance()
                else:
                    self._passed.add(number)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _advance(self) -> None:
        self._next += 1
        while self._next in self._passed:
            self._passed.remove(self._next)
            self._next += 1

    def _has_room(self, size_bytes: int) -> bool:
        held = sum(self._held.values())
        return not held or held + size_bytes <= self._size_bytes

    def _note(self) -> None:
        self.largest = max(self.largest, sum(self._held.values()))
        self._changed.notify_all()

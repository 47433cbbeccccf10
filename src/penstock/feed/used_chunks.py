"""Chunks of mapped files that were used and stay mapped, within a budget of bytes: those used longest ago go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class UsedChunks:
    """Chunks that were used, up to a number of bytes. Safe for threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0

    def add(self, used: Iterable[tuple[int, int]]) -> list[int]:
        """These chunks, with their sizes, were used. Returns those to let go of: the others are within the budget."""
        with self._lock:
            for number, size in used:
                self._bytes += size - self._sizes.pop(number, 0)
                self._sizes[number] = size
            gone = []
            while self._bytes > self._max_bytes:
                number, size = self._sizes.popitem(last=False)
                self._bytes -= size
                gone.append(number)
            return gone

    def discard(self, number: int) -> None:
        """This chunk is in use again."""
        if number in self._sizes:
            with self._lock:
                self._bytes -= self._sizes.pop(number, 0)

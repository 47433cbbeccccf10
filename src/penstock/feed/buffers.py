"""Memory for windows, used again once nobody looks at it any more.

A window is megabytes, and memory fresh from the system costs more to touch for the first time than to fill. Batches are
views of their window's buffer and hold on to it, so that whoever keeps a batch keeps its tokens; a buffer that nothing
refers to but this pool has no reader left, and takes the next window.
"""

from __future__ import annotations

import sys
import threading
from collections import deque

import numpy as np

_KEPT = 4
_ROUNDED_BYTES = 1 << 20


class Buffers:
    """Buffers of about the same size. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[np.ndarray] = deque([np.empty(1, dtype=np.uint8)], maxlen=_KEPT)
        self._free = self._references(0)  # how often something free is referred to, as this interpreter counts
        self._kept.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return Buffers, ()

    def take(self, count: int, dtype: np.dtype) -> np.ndarray:
        """An array of so many numbers, with anything in it. Views of it must be views: no bare pointers."""
        size = count * dtype.itemsize
        with self._lock:
            for place in range(len(self._kept)):
                if size <= self._kept[place].nbytes <= 2 * size and self._references(place) == self._free:
                    return self._kept[place][:size].view(dtype)
            buffer = np.empty(-(-max(1, size) // _ROUNDED_BYTES) * _ROUNDED_BYTES, dtype=np.uint8)
            self._kept.append(buffer)
            return buffer[:size].view(dtype)

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._kept[place])

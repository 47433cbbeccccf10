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
        self._kept: deque[np.ndarray] = deque(maxlen=_KEPT)

    def __reduce__(self) -> tuple[object, ...]:
        return Buffers, ()

    def take(self, count: int, dtype: np.dtype) -> np.ndarray:
        """An array of so many numbers, with anything in it. Views of it must be views: no bare pointers."""
        size = count * dtype.itemsize
        with self._lock:
            for place in range(len(self._kept)):
                buffer = self._kept[place]
                # Referred to by the pool, by `buffer` and by the call itself: by no array made of it.
                if size <= buffer.nbytes <= 2 * size and sys.getrefcount(buffer) == 3:
                    return buffer[:size].view(dtype)
            buffer = np.empty(-(-max(1, size) // _ROUNDED_BYTES) * _ROUNDED_BYTES, dtype=np.uint8)
            self._kept.append(buffer)
            return buffer[:size].view(dtype)

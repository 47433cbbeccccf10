"""Mapped pages are given back to the system by a thread: that takes a millisecond a window, and nobody waits for it.

`mmap.madvise` would hold the interpreter for as long; the C library's own, called through ctypes, does not. What is
given back is held until then, so that its addresses are nobody else's.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable

import numpy as np

Piece = tuple[np.ndarray, int, int]
"""A mapped file's bytes, and which of them: where they begin, at the begin of a page, and how many."""

_lock = threading.Lock()
_given: queue.SimpleQueue[list[Piece] | threading.Event] | None = None


def give_back(pieces: list[Piece]) -> None:
    """Have these pages count as this process's memory no more; whoever touches them has them again."""
    if pieces:
        _work().put(pieces)


def wait_until_given_back(timeout_s: float = 60.0) -> None:
    """Until everything that was to be given back is."""
    done = threading.Event()
    _work().put(done)
    if not done.wait(timeout_s):
        raise TimeoutError(f"pages were not given back within {timeout_s:.0f} s")


def _work() -> queue.SimpleQueue[list[Piece] | threading.Event]:
    global _given
    with _lock:
        if _given is None:
            _given = queue.SimpleQueue()
            threading.Thread(target=_run, args=(_given, _madvise()), name="unmapping", daemon=True).start()
        return _given


def _run(given: queue.SimpleQueue[list[Piece] | threading.Event], madvise: Callable[[int, int, int], int]) -> None:
    while True:
        pieces = given.get()
        if isinstance(pieces, threading.Event):
            pieces.set()
        else:
            for held, start, size in pieces:
                madvise(held.__array_interface__["data"][0] + start, size, mmap.MADV_DONTNEED)
        del pieces  # the last to hold it may be this thread


def _madvise() -> Callable[[int, int, int], int]:
    import ctypes

    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found


def _begin_again() -> None:
    """In a fork there is no thread yet, and the lock may be somebody's who is not there."""
    global _given, _lock
    _given, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_begin_again)

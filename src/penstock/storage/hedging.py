"""When a request counts as slow, and how many slow ones may be asked for a second time.

    asked ─── usual time ─── twice that: still nothing ──► the next endpoint is asked as well; the first answer wins

What is usual is learned from the answers, so a store that is far away is not taken for one that hangs. How many
requests are doubled is bounded by a share of all, so a store that is slow because it has too much to do does not get
twice as much.
"""

from __future__ import annotations

import threading
from collections import deque

_KEPT = 64
_KNOWN_FROM = 6
"""So many answers tell what is usual."""
_USUAL = 0.9
"""So many of the last answers were as quick as what counts as usual, or quicker."""
_SLOW = 2.0
"""So many times the usual time is slow."""
_SHORTEST_S = 0.05
"""Nothing is slow before this: threads and garbage collectors take that long at times."""
_UNKNOWN_S = 0.3
"""What counts as slow before anything is known."""
_SHARE = 0.1
_MOST_SAVED = 10.0
_MOST_ABANDONED = 16
LEAST_BYTES = 1 << 20
"""Bodies are compared by their time a byte; smaller ones as if they had so many."""


class Pace:
    """How long something took lately. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._took: deque[float] = deque(maxlen=_KEPT)

    def note(self, took_s: float) -> None:
        with self._lock:
            self._took.append(took_s)

    def slow_s(self, times: float = 1.0) -> float:
        """After how long it is slow; `times` as much of it is done at once."""
        with self._lock:
            took = sorted(self._took)
        if len(took) < _KNOWN_FROM:
            return _UNKNOWN_S * max(1.0, times)
        return max(_SHORTEST_S, _SLOW * times * took[int(len(took) * _USUAL)])


class HedgeAllowance:
    """How many requests may be asked for twice: a share of all, some at once, and none while many are still under way
    that nobody waits for any more. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved = _MOST_SAVED
        self._abandoned = 0
        self.taken = 0
        """Second requests in all."""

    def earn(self) -> None:
        """A request was made."""
        with self._lock:
            self._saved = min(_MOST_SAVED, self._saved + _SHARE)

    def take(self) -> bool:
        """Whether another may be asked as well; if so, it counts."""
        with self._lock:
            if self._saved < 1.0 or self._abandoned >= _MOST_ABANDONED:
                return False
            self._saved -= 1.0
            self.taken += 1
            return True

    def abandon(self) -> None:
        """Nobody waits for a request any more that is still under way."""
        with self._lock:
            self._abandoned += 1

    def bury(self) -> None:
        """One of those has ended."""
        with self._lock:
            self._abandoned -= 1

    @property
    def abandoned(self) -> int:
        """Requests under way that nobody waits for."""
        with self._lock:
            return self._abandoned

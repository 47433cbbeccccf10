"""The store's clock: windows are measured by what the store says, never by a worker's own clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.exchange.places import store_time
from penstock.storage import Storage

_log = logging.getLogger(__name__)
_APART_S = 5.0
"""Clocks are told in whole seconds, a request after one another."""


class StoreClock:
    """What time it is at the store: asked by writing a small object now and then, counted on in between.

    Stores tell whole seconds, so this clock is up to one second behind; a window closes late rather than early.
    """

    def __init__(
        self,
        storage: Storage,
        key: str,
        *,
        ask_every_s: float = 20.0,
        counting: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._key = key
        self._ask_every_s = ask_every_s
        self._counting = counting
        self._told: tuple[float, float] | None = None

    def now(self) -> float:
        """Seconds since 1970, at the store."""
        at = self._counting()
        if self._told is None or at - self._told[1] >= self._ask_every_s:
            self._storage.put(self._key, b"")
            self._told = store_time(self._storage.head(self._key)), self._counting()
            at = self._told[1]
        told, counted = self._told
        return told + at - counted

    @property
    def url(self) -> str:
        return self._storage.url


def compare_clocks(windows: StoreClock, contributions: StoreClock) -> None:
    """Tell where they differ: windows open by one bucket's clock, and contributions are dated by another's."""
    apart_s = contributions.now() - windows.now()
    if abs(apart_s) > _APART_S:
        _log.warning(
            "the clock of %s is %.0f s %s that of %s: contributions are judged early or late by as much; keep both "
            "buckets with one provider",
            contributions.url,
            abs(apart_s),
            "ahead of" if apart_s > 0 else "behind",
            windows.url,
        )

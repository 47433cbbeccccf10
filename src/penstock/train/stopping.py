"""A wish to stop: SIGINT and SIGTERM finish the step, commit and end; a second one ends at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger(__name__)


class StopRequest:
    """Set once, by a signal or by a caller; looked at between steps."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def requested(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until somebody wishes to stop."""
        self._event.wait(seconds)


class SignalsStop:
    """While inside, SIGINT and SIGTERM set a `StopRequest`; in other threads than the main one, does nothing."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalsStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.requested():
            os._exit(128 + number)
        self._stop.set()
        _log.warning("stopping after this step, to commit what is learned; once more ends at once, uncommitted")

"""A wish to stop: SIGINT, SIGTERM and a stop file finish the step, commit and end; a second signal ends at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

_log = logging.getLogger(__name__)

STOP_FILE = "stop"
"""In the run's folder; `penstock stop` writes it, and whoever honours it removes it."""
_LOOK_EVERY_S = 0.25
_TOLD = "stopping after this step, to commit what is learned; once more ends at once, uncommitted"

StopWish = Literal["signal", "file"]


class StopRequest:
    """Set once, by a signal or by a caller, or found as a file; looked at between steps. Any thread may ask."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._why: StopWish = "signal"
        self._file: Path | None = None
        self._looked_at = 0.0

    def set(self, why: StopWish = "signal") -> None:
        if not self._event.is_set():
            self._why = why
            self._event.set()

    def watch(self, file: Path) -> None:
        """Look out for a stop file from now on; one that is there already was meant for a run before this one."""
        file.unlink(missing_ok=True)
        self._file = file

    def honoured(self) -> None:
        """The run ends as wished: the file has done its service."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def requested(self) -> bool:
        return self.requested_by() is not None

    def requested_by(self) -> StopWish | None:
        """What the wish came by; None where there is none. The file is looked for a few times a second at most."""
        now = time.monotonic()
        if self._file is not None and not self._event.is_set() and now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if self._file.exists():
                self.set("file")
        return self._why if self._event.is_set() else None

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until somebody wishes to stop."""
        self._event.wait(seconds)


class SignalsStop:
    """While inside, SIGINT and SIGTERM set a `StopRequest`; in other threads than the main one, does nothing.

    Args:
        stop: What is set.
        grace_s: A second signal within this time is the same wish: Ctrl-C reaches a rank from the terminal and, a
            moment later, from its launcher.
        told: What the first signal's line of the log says.
    """

    def __init__(self, stop: StopRequest, *, grace_s: float = 0.0, told: str = _TOLD) -> None:
        self._stop = stop
        self._grace_s = grace_s
        self._told = told
        self._first_at: float | None = None
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
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._stop.set()
            _log.warning("%s", self._told)
        elif now - self._first_at >= self._grace_s:
            os._exit(128 + number)

"""What a role has done, one JSON object a line, in its work folder: metrics.jsonl."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import StorageError

_log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
_SHOWN = (
    "loss",
    "sent_bytes",
    "contributors",
    "was_taken",
    "rejected",
    "missing",
    "scores",
    "out",
    "flags",
    "window_s",
)
"""What a line of the log tells of an event; the file has all of it."""


class Journal:
    """Appends events; every one has `event`, `time` and `role`. The log is told in short; it alone without a folder."""

    def __init__(self, folder: Path | None, role: str) -> None:
        self._path = None if folder is None else folder / METRICS_FILE
        self._role = role

    def note(self, event: str, **told: Any) -> None:
        whole = {"event": event, "time": time.time(), "role": self._role, **told}
        _log.info("%s: %s", self._role, _line(event, told))
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(orjson.dumps(whole) + b"\n")
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror or error}") from error


def _line(event: str, told: dict[str, Any]) -> str:
    shown = [f"{name} {_short(told[name])}" for name in _SHOWN if told.get(name) not in (None, [], {})]
    return f"{event} {told['window']}" + "".join(f", {each}" for each in shown)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return " ".join(str(each) for each in value) if isinstance(value, list) else str(value)

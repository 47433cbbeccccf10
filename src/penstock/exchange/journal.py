"""What a role has done, one JSON object a line, in its work folder: metrics.jsonl."""

from __future__ import annotations

import logging
import os
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
    "why",
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
            _append(self._path, orjson.dumps(whole) + b"\n")
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror or error}: mend that and run the same command again; "
                "nothing that was learned is lost"
            ) from error


def _append(path: Path, line: bytes) -> None:
    """Add a line as a whole or not at all, whatever the one before it came to."""
    with path.open("a+b", buffering=0) as file:
        end = file.tell()
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":  # a writer was killed in mid-line
            line = b"\n" + line
        try:
            while line:  # a disk that fills up may take part of it
                line = line[file.write(line) or 0 :]
        except OSError:
            file.truncate(end)
            raise


def _line(event: str, told: dict[str, Any]) -> str:
    shown = [f"{name} {_short(told[name])}" for name in _SHOWN if told.get(name) not in (None, [], {})]
    return f"{event} {told['window']}" + "".join(f", {each}" for each in shown)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return " ".join(str(each) for each in value) if isinstance(value, list) else str(value)

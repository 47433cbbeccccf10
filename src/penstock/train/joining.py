"""More workers for a run that is under way: `penstock join` leaves a file in its folder, the supervisor takes it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

_log = logging.getLogger(__name__)

JOIN_FILE = "join"
"""In the run's folder: how many more workers are wanted."""
_LOOK_EVERY_S = 0.5


class JoinRequests:
    """Looks for wishes for more workers, a few times a second at most."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / JOIN_FILE
        self._file.unlink(missing_ok=True)  # meant for a run before this one
        self._looked_at = 0.0

    def take(self) -> int:
        """How many more are wanted since the last look."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return 0
        self._looked_at = now
        try:
            text = self._file.read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return 0
        self._file.unlink(missing_ok=True)
        if not text.isdecimal():
            _log.warning("%s holds %r and was passed over: expected how many workers are to join", self._file, text)
            return 0
        return int(text)

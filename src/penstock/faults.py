"""Named fault points: places where a crash is most likely to do harm, so that tests can crash exactly there.

A point costs one comparison while nothing is armed. Armed through the environment, so that it reaches spawned
processes as well:

    PENSTOCK_FAULT="point|subject|nth"   SIGKILL this process at the nth hit of `point` whose subject matches the
                                         shell pattern `subject`. Exactly one process dies: see PENSTOCK_FAULT_ONCE.
    PENSTOCK_FAULT_ONCE=path             a file created before the kill; while it exists nobody else is killed.
    PENSTOCK_FAULT_HOW=hang              hang there instead, with all other threads alive.
    PENSTOCK_FAULT_TRACE=path            append "point<TAB>subject" of every hit, for tests that enumerate the points.
"""

from __future__ import annotations

import os
import signal
import time
from fnmatch import fnmatchcase
from pathlib import Path

POINTS: dict[str, str] = {
    "storage.before_fsync": "bytes are written to a temporary file, not yet durable",
    "storage.before_rename": "the temporary file is durable, not yet visible; on an object store, nothing is sent",
    "storage.after_rename": "the object is visible, its folder entry not yet durable",
    "storage.after_put": "the object is visible and durable",
    "storage.after_delete": "an object was deleted",
    "ledger.before_transaction": "a ledger transaction is about to commit",
    "ledger.after_transaction": "a ledger transaction is durable, its caller does not know yet",
    "train.after_step": "an optimizer step is done and nobody has recorded it",
    "train.before_checkpoint": "a commit has begun, no checkpoint file is written",
    "train.before_commit": "the checkpoint is sealed, the ledger does not know it",
    "train.after_commit": "checkpoint and ledger agree, nothing is pruned or announced",
    "exchange.before_upload": "a contribution is made and kept on disk, nothing of it is sent",
    "exchange.after_upload": "a contribution is uploaded, its miner has not noted it",
    "exchange.before_publish": "an aggregate is written, no manifest names it",
    "exchange.after_publish": "a window is closed, its aggregator has not taken it yet",
    "exchange.before_checkpoint": "the weights of a checkpoint are written, nothing names them",
    "exchange.before_scores": "a window is scored, nobody knows",
}


class _Armed:
    """What the environment asks for; read once a process, again when a test changes it."""

    def __init__(self) -> None:
        self.spec = os.environ.get("PENSTOCK_FAULT", "")
        self.once = os.environ.get("PENSTOCK_FAULT_ONCE", "")
        self.how = os.environ.get("PENSTOCK_FAULT_HOW", "kill")
        self.trace = os.environ.get("PENSTOCK_FAULT_TRACE", "")
        self.hits = 0

    def reach(self, point: str, subject: str) -> None:
        if point not in POINTS:
            raise KeyError(f"fault point {point!r} is not declared in penstock.faults.POINTS")
        if self.trace:
            with Path(self.trace).open("a", encoding="utf-8") as file:
                file.write(f"{point}\t{subject}\n")
        if self.spec and self._is_due(point, subject):
            while self.how == "hang":
                time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_due(self, point: str, subject: str) -> bool:
        want_point, want_subject, nth = self.spec.split("|")
        if point != want_point or not fnmatchcase(subject, want_subject):
            return False
        self.hits += 1
        if self.hits < int(nth):
            return False
        if self.once:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
        return True


def arm() -> None:
    """Read the environment again."""
    global _armed
    armed = _Armed()
    _armed = armed if armed.spec or armed.trace else None


_armed: _Armed | None = None
arm()


def reach(point: str, subject: str = "") -> None:
    """Pass a fault point; `subject` says on what (a key, an operation)."""
    if _armed is not None:
        _armed.reach(point, subject)

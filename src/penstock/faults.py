"""Named fault points: places where a crash is most likely to do harm, so that tests can crash exactly there.

A point costs one comparison while nothing is armed. Armed through the environment, so that it reaches spawned
processes as well:

    PENSTOCK_FAULT="point|subject|nth"   SIGKILL this process at the nth hit of `point` whose subject matches the
                                         shell pattern `subject`. Exactly one process dies: see PENSTOCK_FAULT_ONCE.
    PENSTOCK_FAULT_ONCE=path             a file created before the kill; while it exists nobody else is killed.
    PENSTOCK_FAULT_TRACE=path            append "point<TAB>subject" of every hit, for tests that enumerate the points.
"""

from __future__ import annotations

import os
import signal
from fnmatch import fnmatchcase
from pathlib import Path

POINTS: dict[str, str] = {
    "storage.before_fsync": "bytes are written to a temporary file, not yet durable",
    "storage.before_rename": "the temporary file is durable, not yet visible",
    "storage.after_rename": "the object is visible, its folder entry not yet durable",
    "storage.after_put": "the object is visible and durable",
    "storage.after_delete": "an object was deleted",
    "ledger.before_transaction": "a ledger transaction is about to commit",
    "ledger.after_transaction": "a ledger transaction is durable, its caller does not know yet",
    "train.after_step": "an optimizer step is done and nobody has recorded it",
    "train.before_checkpoint": "a commit has begun, no checkpoint file is written",
    "train.before_commit": "the checkpoint is sealed, the ledger does not know it",
    "train.after_commit": "checkpoint and ledger agree, nothing is pruned or announced",
}

_spec = os.environ.get("PENSTOCK_FAULT", "")
_trace = os.environ.get("PENSTOCK_FAULT_TRACE", "")
_once = os.environ.get("PENSTOCK_FAULT_ONCE", "")
_armed = bool(_spec or _trace)
_hits = 0


def reach(point: str, subject: str = "") -> None:
    """Pass a fault point; `subject` says on what (a key, an operation)."""
    if _armed:
        _reach(point, subject)


def _reach(point: str, subject: str) -> None:
    global _hits
    if point not in POINTS:
        raise KeyError(f"fault point {point!r} is not declared in penstock.faults.POINTS")
    if _trace:
        with Path(_trace).open("a", encoding="utf-8") as file:
            file.write(f"{point}\t{subject}\n")
    if not _spec:
        return
    want_point, want_subject, nth = _spec.split("|")
    if point != want_point or not fnmatchcase(subject, want_subject):
        return
    _hits += 1
    if _hits < int(nth):
        return
    if _once:
        try:
            os.close(os.open(_once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)

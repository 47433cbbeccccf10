"""Whether the workers of a run live, as far as that can be told from here.

A session keeps its chunks until its deadline, and the ledger calls it active until then. That its process was killed a
moment ago is told by what ends with a process: the lock of the run's folder, and the process itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.ledger.base import LedgerStatus, WorkerStatus
from penstock.ledger.postgres_url import is_postgres
from penstock.observe.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A session that the ledger calls active, or silent."""

    worker: WorkerStatus
    dead_because: str
    """Empty where it may well live."""
    last_sign_s: float
    """Seconds since its last sign of life, or more where it is past its deadline."""


def lives(run: RunFolder, status: LedgerStatus) -> list[Life]:
    """Of every session that has neither ended nor been fenced."""
    training = run.is_training()
    local = not is_postgres(run.settings.get("ledger") or "")
    timeout_s = float(run.settings.get("session_timeout_s", 60.0))
    return [
        Life(
            worker=worker,
            dead_because=_why_dead(worker, training=training, local=local),
            last_sign_s=max(0.0, timeout_s - worker.seconds_left),
        )
        for worker in status.workers
        if worker.state in ("active", "silent")
    ]


def _why_dead(worker: WorkerStatus, *, training: bool, local: bool) -> str:
    if not training:
        return "no training is under way"
    if local and worker.pid and not _is_there(worker.pid):
        return "its process is gone"
    return ""


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True

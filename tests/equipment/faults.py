"""Kills at named fault points, in processes of their own; see `penstock.faults`."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from equipment.forks import run as fork
from equipment.forks import run_code
from equipment.processes import Finished, python, run


@dataclass(frozen=True, slots=True)
class Killed:
    """What became of a command that was to be killed at a fault point."""

    fired: bool
    """Whether some process of it reached the point and died there."""
    finished: Finished
    """How the command itself ended: it may outlive a killed child, or be the one that died."""


def trace(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = 120,
) -> list[tuple[str, str]]:
    """Run a command undisturbed; return every fault point its processes passed, as (point, subject), in order."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        finished = _run(command, {**(env or {}), "PENSTOCK_FAULT_TRACE": str(path)}, cwd, timeout_s)
        assert finished.returncode == 0, finished.output
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    hits = (line.partition("\t") for line in lines)
    return [(point, subject) for point, _, subject in hits]


def each_hit(hits: Iterable[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """Every single hit of a trace as (point, subject pattern, nth), as `run_killed_at` takes them."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for point, subject in hits:
        seen[point, subject] += 1
        found.append((point, glob.escape(subject), seen[point, subject]))
    return found


def run_killed_at(
    command: Sequence[str],
    point: str,
    subject: str = "*",
    nth: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = 120,
) -> Killed:
    """Run a command of which one process is killed at the nth hit of a point whose subject matches a shell pattern."""
    assert "|" not in point + subject, f"{point} {subject}: a fault cannot be told by a name with | in it"
    with TemporaryDirectory() as folder:
        once = Path(folder, "once")
        fault = {"PENSTOCK_FAULT": f"{point}|{subject}|{nth}", "PENSTOCK_FAULT_ONCE": str(once)}
        finished = _run(command, {**(env or {}), **fault}, cwd, timeout_s)
        return Killed(once.exists(), finished)


def _run(
    command: Sequence[str], env: Mapping[str, str], cwd: str | os.PathLike[str] | None, timeout_s: float
) -> Finished:
    """Run a command; what `python` says is run by a fork, which takes a fraction of a fresh interpreter's time."""
    if list(command[:2]) == python("")[:2] and cwd is None:
        code, *said = fork(run_code, *command[2:], env=env, timeout_s=timeout_s)
        return Finished(code, "".join(said))
    return run(command, env=env, cwd=cwd, timeout_s=timeout_s)

"""The `penstock` command in a process of its own, forked from one that has everything imported.

It has its own arguments, environment, output and exit code, as a shell would give it; what it does not have is the
start of an interpreter, which takes longer than most commands. Tests of signals to it start a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipment.forks import run
from penstock.cli.main import main


@dataclass(frozen=True, slots=True)
class Told:
    """How a command ended, and what it said."""

    returncode: int
    """Negative for a signal, as in `subprocess`."""
    stdout: str
    stderr: str


def penstock(*arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> Told:
    """Run a command to its end; `env` is added to the environment."""
    return Told(*run(_main, *map(str, arguments), env=env or {}, timeout_s=timeout_s))


def _main(*arguments: str) -> None:
    sys.argv = ["penstock", *arguments]
    main()

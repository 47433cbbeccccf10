"""The `penstock` command in a process of its own, forked from one that has everything imported.

It has its own arguments, environment, output and exit code, as a shell would give it; what it does not have is the
start of an interpreter, which takes longer than most commands. Tests of signals to it start a real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

from equipment.training import start_process
from penstock import faults
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
    with TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        environment = {**os.environ, **(env or {})}
        process = start_process(_run, [os.fspath(word) for word in arguments], environment, *map(str, paths))
        wait([process.sentinel], timeout_s)
        if process.exitcode is None:
            process.kill()
        process.join()
        assert process.exitcode is not None
        said = [path.read_text(encoding="utf-8") if path.exists() else "" for path in paths]
        return Told(process.exitcode, *said)


def _run(arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    faults.arm()
    sys.argv = ["penstock", *arguments]
    main()

"""Fresh processes that are quick to start: forked from a server that has imported what tests use, and used none of it.

An interpreter that imports torch takes seconds, and without it still longer than most of what is done in one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock import faults

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",  # which a child would import, as it does the main module
        "penstock.blocks",
        "penstock.cli.main",
        "penstock.ledger",
        "penstock.train.run",
        "penstock.train.replica",
        "torch._dynamo",  # optimizers import it
    ]
)
_asking = threading.Lock()
"""Whoever starts a process asks all others whether they have ended, and an answer can be read once: of two threads that
ask at a time one would be told 255."""


def start_process(target: Callable[..., None], *args: object) -> BaseProcess:
    """Begin something in a fresh process that has torch imported."""
    process = _context.Process(target=target, args=args)
    with _asking:
        process.start()
    return process


def ended(process: BaseProcess, timeout_s: float) -> int:
    """Wait for the end of a process, and kill it where that takes too long; its exit code, -9 for a killed one."""
    wait([process.sentinel], timeout_s)
    with _asking:
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"process {process.pid} did not end within {timeout_s} s")
        return process.exitcode


def run(
    target: Callable[..., None], *args: object, env: Mapping[str, str], timeout_s: float = 120
) -> tuple[int, str, str]:
    """Run something to its end, with this process's environment and `env`: its exit code, output and errors."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        process = start_process(_redirected, *map(str, paths), {**os.environ, **env}, target, *args)
        code = ended(process, timeout_s)
        stdout, stderr = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
        return code, stdout, stderr


def _redirected(stdout: str, stderr: str, env: dict[str, str], target: Callable[..., None], *args: object) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    faults.arm()
    target(*args)


def run_code(code: str, *arguments: str) -> None:
    """What ``python -c code arguments`` does, in this process."""
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})

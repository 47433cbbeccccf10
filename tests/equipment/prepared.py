"""Workers and ranks of a training as forks of a process that has torch imported: a fresh interpreter takes seconds.

What a training starts is otherwise as it always is: the same module in a process of its own, with the same environment
and the same end of its channel. Where starting itself is the matter tests have real interpreters.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Protocol

import orjson
import pytest

from penstock import faults

HELD_BACK = {signal.SIGINT, signal.SIGTERM}
"""What a worker is born with held back, see `penstock.train.processes`."""
_ORDER_BYTES = 1 << 20


class Started(Protocol):
    """As much of a `subprocess.Popen` as is asked of a worker."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


Start = Callable[[str, Mapping[str, str], int], Started | None]
"""Starts a module with an environment and a file descriptor; None where it cannot."""


@contextmanager
def workers_started_by(start: Start) -> Iterator[None]:
    """While inside, trainings of this process have their workers started otherwise."""

    def popen(
        command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, env: Mapping[str, str]
    ) -> Started | subprocess.Popen[bytes]:
        _, flag, module, number = command
        assert (flag, number, stdin) == ("-m", str(pass_fds[0]), subprocess.DEVNULL), command
        started = start(module, env, pass_fds[0])
        return started or subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, env=env)

    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
        patch.setattr("penstock.train.processes.subprocess", stand_in)
        yield


def become(module: str, environment: Mapping[str, str], number: int) -> None:
    """Be the worker that ``python -m module number`` would be, and end as it does."""
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faults.arm()
        sys.argv = [module, str(number)]
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told on stderr, and the end of this process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class WaitingWorkers:
    """Children that are forked before they are needed, while this process has no threads: real children of it."""

    def __init__(self, count: int) -> None:
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
            child = os.fork()
            if child == 0:
                for _, line in [*self._waiting, (0, ours)]:
                    line.close()  # or those that wait would not see the end of the one they wait for
                _wait_to_be(theirs)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._waiting.append((child, ours))

    def start(self, module: str, environment: Mapping[str, str], number: int) -> Started | None:
        if not self._waiting:
            return None
        child, line = self._waiting.pop(0)
        with line:
            socket.send_fds(line, [orjson.dumps([module, dict(environment)])], [number])
        return _Child(child)


def _wait_to_be(line: socket.socket) -> None:
    order, handed, _, _ = socket.recv_fds(line, _ORDER_BYTES, 1)
    line.close()
    if not order:
        os._exit(0)  # never needed
    module, environment = orjson.loads(order)
    become(module, environment, handed[0])


class _Child:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self._poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self._poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

"""Workers and ranks that a training process has forked before it needs them: real children of it, with torch imported.

A fresh interpreter that imports torch takes seconds, a kill and a resume with two workers four of them. What a training
starts is otherwise as it always is: the same module with the same environment and the same end of its channel. Where
the starting itself is the matter, and where more are started than were prepared, real interpreters are.
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
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import orjson

from penstock import faults
from penstock.train import processes

_ORDER_BYTES = 1 << 20
_HELD_BACK = {signal.SIGINT, signal.SIGTERM}
"""What a worker is born with held back, see `penstock.train.processes`."""

_waiting: list[tuple[int, socket.socket]] = []


def prepare_workers(count: int) -> None:
    """Fork so many children that wait to be started. To be called in a process that has no threads yet."""
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        child = os.fork()
        if child == 0:
            for _, line in [*_waiting, (0, ours)]:
                line.close()  # or the end of this process would not be seen by those that still wait
            _be_started(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        _waiting.append((child, ours))
    processes.subprocess = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)  # pyright: ignore[reportAttributeAccessIssue]


def _be_started(line: socket.socket) -> None:
    """Wait for what to be, be it, and end."""
    order, handed, _, _ = socket.recv_fds(line, _ORDER_BYTES, 1)
    line.close()
    if not order:
        os._exit(0)  # never needed
    module, environment = orjson.loads(order)
    code = 0
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faults.arm()
        sys.argv = [module, str(handed[0])]
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told on stderr, and the end of this process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Started:
    """What `subprocess.Popen` would return."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _start(
    command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, env: Mapping[str, str]
) -> _Started | subprocess.Popen[bytes]:
    if not _waiting:
        return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, env=env)
    _, flag, module, given = command
    assert (flag, given, stdin) == ("-m", str(pass_fds[0]), subprocess.DEVNULL), command
    child, line = _waiting.pop(0)
    with line:
        socket.send_fds(line, [orjson.dumps([module, dict(env)])], list(pass_fds))
    return _Started(child)

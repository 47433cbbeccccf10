"""Python in processes of its own: to run to the end, to hold something, to be killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended: negative return codes are signals, as in `subprocess`."""

    returncode: int
    output: str


def python(code: str, *args: str) -> list[str]:
    """A command that runs `code`; the arguments are its ``sys.argv[1:]``."""
    return [sys.executable, "-c", code, *args]


def pickled(value: object) -> str:
    """A value as an argument: ``pickle.loads(bytes.fromhex(sys.argv[1]))`` gets it back."""
    return pickle.dumps(value).hex()


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = 120,
) -> Finished:
    """Run a command to its end; `env` is added to the environment. One that hangs is killed with all its children."""
    # A file, not a pipe: orphans of a killed process would keep a pipe open, and this call waiting.
    with TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            returncode = None
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert returncode is not None, f"{command} did not end within {timeout_s} s:\n{text}"
    return Finished(returncode, text)


@contextmanager
def held_open(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command and wait until it says ``ready``. Leaving closes its standard input, so that it can end."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready"), f"{command} said {line!r} instead of ready"
        yield process
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()

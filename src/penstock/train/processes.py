"""A process of ours, as the one that started it sees it: how it lives, and how it is told to be dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.train.channel import Channel, channel_pair


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker or a rank."""

    name: str
    process: subprocess.Popen[bytes]
    channel: Channel
    heard_at: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life: a thread of its own does that."""
    progress: int = 0
    """Grows whenever its main thread comes past a step;"""
    moved_at: float = field(default_factory=time.monotonic)
    """when it last did."""
    error: str = ""
    lost_others: bool = False
    """Whether its error is that another one has gone."""
    refused: bool = False
    """Whether its error is that what it was asked to do cannot be done: starting it again would not help."""

    def note_progress(self, progress: int) -> None:
        if progress != self.progress:
            self.progress, self.moved_at = progress, time.monotonic()

    def kill_if_hung(self, *, silence_s: float, stall_s: float) -> None:
        """Kill it where its process is stopped, or its main thread makes no more progress."""
        now = time.monotonic()
        if now - self.heard_at > silence_s:
            self.kill(f"silent for {silence_s:.0f} s, killed")
        elif now - self.moved_at > stall_s:
            self.kill(f"no step for {stall_s:.0f} s, killed")

    def kill(self, why: str) -> None:
        self.error = self.error or why
        self.process.kill()
        self.heard_at = self.moved_at = time.monotonic()  # its end of file is on the way

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def start_process(name: str, module: str, environment: Mapping[str, str] | None = None) -> WorkerProcess:
    """Start ``python -m module FD``, with the other end of a channel as its file descriptor.

    Stop signals reach the whole group. It is born with them held back: it decides what they mean once it can.
    """
    channel, theirs = channel_pair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return WorkerProcess(name, process, channel)

"""Messages between the supervisor and a worker: JSON lines over a socket pair. End of file: the other side is dead.

worker to supervisor   {"kind": "ready"}  {"kind": "event", ...}  {"kind": "submitted", session, state}
                       {"kind": "alive", progress}  {"kind": "failed", error}
supervisor to worker   {"kind": "order", order}  {"kind": "go_on", round, checkpoint_id, digest}
                       {"kind": "meet", round}  {"kind": "end"}
rank to launcher       {"kind": "event", ...}  {"kind": "alive", progress}  {"kind": "failed", error, ...}
                       {"kind": "result", result}
launcher to rank       {"kind": "order", config}  {"kind": "stop"}
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

import orjson

Message = dict[str, Any]

ORPHANED = 70
"""Exit code of a process whose starter died."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What a worker is started with; the rest it finds in the run's folder."""

    run_dir: str
    worker: str
    workers: int
    generation: int
    device: str
    """What it computes on, as torch spells it."""
    ledger: str
    """Where the ledger is, password and all: an order is neither saved nor logged."""


class Channel:
    """One end of the socket pair. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._buffer = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; False where nobody is left to read it."""
        try:
            data = orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
            with self._sending:
                self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Wait for bytes and return the messages they complete; None at the end."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [orjson.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """The supervisor's end, and the worker's socket to hand down."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: a stopped one could not notice it by itself."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

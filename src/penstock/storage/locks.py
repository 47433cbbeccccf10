"""A lock that ends with its process: flock on a file that is removed as the lock is given back."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.errors import StorageBusy
from penstock.storage.files import create_in, translated


@contextmanager
def file_lock(path: Path, *, holding: str, purpose: str) -> Iterator[None]:
    """Hold the lock file `path`, or raise `StorageBusy` saying who holds it; `holding` names what it guards."""
    with translated(path):
        fd = _lock(path, holding, purpose)
    owner = os.getpid()
    _held.add(fd)
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child that unwinds to here holds nothing
            _held.discard(fd)
            with suppress(OSError):
                if _is_at(path, fd):
                    path.unlink()  # while still holding it: whoever waits sees a new file and locks that
            os.close(fd)


@contextmanager
def waiting_file_lock(path: Path, *, holding: str, purpose: str, timeout_s: float) -> Iterator[None]:
    """`file_lock` for what takes a moment: waits its turn, and raises `StorageBusy` only when none comes in time."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(file_lock(path, holding=holding, purpose=purpose))
                break
            except StorageBusy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.002)
        yield


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock file `path` just now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock(path: Path, holding: str, purpose: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = create_in(path.parent, lambda: os.open(path, flags, 0o644))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise StorageBusy(f"{holding} is in use by {holder}: wait until it ends, or stop it") from None
        except OSError:
            os.close(fd)
            raise
        if _is_at(path, fd):
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} for {purpose}\n".encode(), 0)
            except OSError:  # a full disk: the lock is not to outlive the try
                path.unlink(missing_ok=True)
                os.close(fd)
                raise
            return fd
        os.close(fd)  # the holder before us removed this file as it left; lock the one that is there now


def _is_at(path: Path, fd: int) -> bool:
    """Whether an open file is the one that has this path now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


_held: set[int] = set()
"""Descriptors of the locks this process holds."""


def _let_go_of_inherited_locks() -> None:
    """A forked child shares its parent's descriptors: it would go on holding the lock of a parent that was killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_of_inherited_locks)

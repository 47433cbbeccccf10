"""A role's work folder: one process's at a time. Two would write one memory, one contribution and one journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.storage import LocalStorage


@contextmanager
def hold(work: Path | None, role: str, run: str) -> Iterator[None]:
    """Hold the folder while inside, or raise `StorageBusy` saying who does; a role without one holds nothing. The lock
    ends with its process, however that ends."""
    if work is None:
        yield
        return
    with LocalStorage(work).exclusive("work", purpose=f"{role} of run {run!r}"):
        yield

"""What a forked process begins anew.

Only the thread that forks comes along. A lock that another one held at that moment is held for ever in the child, and
what it guarded may be half changed. So whoever may be used on in a fork gets new locks there, before anything else
runs, and forgets what it can find out again. An iteration does not go on in a fork: see `refuse_forked`.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something with locks that may come along when a process forks."""

    def renew(self) -> None:
        """New locks. Runs in the child; nothing else does yet."""
        ...


_renewed: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_forks(owner: Renewable) -> None:
    """Have `owner` renewed in every process that is forked from this one, as long as somebody refers to it."""
    _renewed.add(owner)


def _renew_all() -> None:
    for owner in list(_renewed):
        owner.renew()


os.register_at_fork(after_in_child=_renew_all)

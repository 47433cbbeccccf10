"""What is due for a step, in the order it will be needed: whoever is free takes the next.

Units are cut into parts for it, so that nobody is left alone with a whole unit at the end, and the unit that is needed
next is stepped by all.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from penstock.train.streamed.lanes import Mark
from penstock.train.streamed.layout import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """How to step."""

    number: int
    """Of steps this weight has seen, with this one."""
    learning_rate: float
    scale: float
    """What gradients are multiplied by first."""


PART = 1 << 24
"""Numbers that somebody takes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueStep:
    """The step of a part of a unit."""

    unit: Unit
    part: slice
    order: StepOrder
    arrived: Mark
    """Behind the way of the unit's gradients to the host."""
    may_visit: bool
    """Whether it may be stepped on the device."""


class Due:
    """Taken from by several threads."""

    def __init__(self) -> None:
        self._steps: deque[DueStep] = deque()
        self._lock = threading.Lock()

    def put(self, step: DueStep) -> None:
        with self._lock:
            self._steps.append(step)

    def take(self, *, visiting: bool) -> DueStep | None:
        """The first that is left, or the first that may visit the device; None where there is none."""
        with self._lock:
            for step in self._steps:
                if step.may_visit or not visiting:
                    self._steps.remove(step)
                    return step
        return None


def parts_of(whole: slice) -> list[slice]:
    """A share of a unit, as it is taken."""
    return [slice(start, min(start + PART, whole.stop)) for start in range(whole.start, whole.stop, PART)]

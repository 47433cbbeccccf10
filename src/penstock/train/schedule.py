"""The learning rate as a pure function of the run's step: the same after any resume, and for any number of replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "cosine", "linear"]
KINDS: tuple[Kind, ...] = ("constant", "cosine", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Up in a straight line over the warm-up, then as `kind` says down to a share of the peak, then level."""

    learning_rate: float
    """The peak."""
    kind: Kind = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    """The step at which the lowest rate is reached; of no meaning where it is constant."""
    min_ratio: float = 0.1
    """The lowest rate as a share of the peak."""

    def at(self, step: int) -> float:
        """The rate of a step of the run; the first is 1."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.kind == "constant":
            return self.learning_rate
        share = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = 1.0 - share if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * (self.min_ratio + (1.0 - self.min_ratio) * left)

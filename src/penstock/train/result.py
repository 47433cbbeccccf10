"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.committing import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    run_dir: str
    reason: StopReason
    total_steps: int
    epoch: int
    checkpoint_id: str

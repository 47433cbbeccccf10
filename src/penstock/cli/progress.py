"""The live line of a training run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.cli.output import console

if TYPE_CHECKING:
    from rich.progress import TaskID

_SMOOTHING = 0.95


class TrainingProgress:
    """A hook that shows samples, loss and tokens per second; commits and lost workers get a line of their own."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._screen = console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._screen,
            transient=True,
            disable=quiet or not self._screen.is_terminal,
        )
        self._quiet = quiet
        self._gone = False
        self._task: TaskID | None = None
        self._loss: float | None = None
        self._tokens = 0
        self._steps = 0
        self._total_samples = 0
        self._began = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._gone:
            self._bar.stop()

    def on_event(self, event: dict[str, Any]) -> None:
        """Show an event; where nobody can see it any more, a training goes on all the same."""
        if self._gone:
            return
        try:
            self._show(event)
        except OSError:
            self._gone = True

    def _show(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "run_started":
            self._total_samples = event["total_samples"]
            self._task = self._bar.add_task("starting", total=self._total_samples)
            self._say(
                f"{event['dataset']}: {event['total_samples']:,} samples in {event['total_blocks']} blocks, "
                f"{event['workers']} worker(s), run {event['run_dir']}"
                + (f", resumed at step {event['total_steps']}" if event["total_steps"] else "")
            )
        elif kind == "step":
            self._steps += 1
            self._tokens += event["num_tokens"]
            before = event["loss"] if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1 - _SMOOTHING) * event["loss"]
            self._describe()
        elif kind == "chunk" and self._task is not None:
            self._bar.advance(self._task, event["samples"])
        elif kind == "worker_lost":
            self._say(f"[red]{event['worker']} lost[/red] ({event['reason']}); its chunks went back")
        elif kind == "commit" and not self._screen.is_terminal:
            self._say(self._summary() + f", commit {event['checkpoint_id']}")

    def _describe(self) -> None:
        if self._task is not None and self._steps % 5 == 1:
            self._bar.update(self._task, description=self._summary())

    def _summary(self) -> str:
        rate = self._tokens / max(1e-9, time.monotonic() - self._began)
        loss = "-" if self._loss is None else f"{self._loss:.3f}"
        return f"{self._steps} steps, loss {loss}, {rate:,.0f} tokens/s"

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._screen.print(text)

"""The live line of a training run."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.cli.output import console

_SMOOTHING = 0.95
_LINE_EVERY_S = 10.0
"""How often progress is told where there is no terminal to draw a bar on."""


class TrainingProgress:
    """A hook that shows samples, loss and tokens per second; lost workers get a line of their own."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._screen = console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self._screen,
            transient=True,
            disable=quiet or not self._screen.is_terminal,
        )
        self._quiet = quiet
        self._gone = False
        self._task = TaskID(0)
        self._loss: float | None = None
        self._tokens = self._step = self._epoch = 0
        self._began = self._said_at = time.monotonic()

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
            self._start(event)
        elif kind == "step":
            self._step = event["step"]
            self._tokens += event["num_tokens"]
            before = event["loss"] if self._loss is None else self._loss
            self._loss = _SMOOTHING * before + (1 - _SMOOTHING) * event["loss"]
            self._tell_step(event["epoch"])
        elif kind == "chunk":
            self._bar.advance(self._task, event["samples"])
        elif kind == "worker_lost":
            self._say(f"{event['worker']} lost ({event['reason']}); its chunks went back", style="red")
        elif kind == "commit" and not self._screen.is_terminal:
            self._say(f"commit {event['checkpoint_id']}: {event['samples']:,} samples more are learned")

    def _start(self, event: dict[str, Any]) -> None:
        self._epoch, self._began = event["epoch"], time.monotonic()
        self._task = self._bar.add_task("starting", total=event["total_samples"], completed=event["samples_committed"])
        resumed = f", resumed at step {event['total_steps']}" if event["total_steps"] else ""
        self._say(
            f"{event['dataset']}: {event['total_samples']:,} samples in {event['total_blocks']} blocks, "
            f"workers: {event['workers']}, run: {event['run_dir']}{resumed}"
        )

    def _tell_step(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._bar.reset(self._task)
        rate = self._tokens / max(1e-9, time.monotonic() - self._began)
        told = f"epoch {epoch}, step {self._step}, loss {self._loss:.3f}, {rate:,.0f} tokens/s"
        self._bar.update(self._task, description=told)
        if not self._screen.is_terminal and time.monotonic() - self._said_at > _LINE_EVERY_S:
            self._said_at = time.monotonic()
            self._say(told)

    def _say(self, text: str, style: str | None = None) -> None:
        if not self._quiet:
            self._screen.print(text, style=style)

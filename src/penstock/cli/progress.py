"""The live display of a training run."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn
from rich.text import Text

from penstock.cli.output import console, counted, human_bytes

_SMOOTHING = 0.95
_LINE_EVERY_S = 10.0
"""How often progress is told where there is no terminal to draw a bar on."""


class Tally:
    """What a run has done since it was started, from its events: pure arithmetic, time an argument."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.step = self.epoch = self.steps_made = self.skipped = 0
        self.total_samples = self.committed = 0
        self.chunks: dict[str, int] = {}
        """Finished by each worker."""
        self.learning_rate = 0.0
        self._pending: dict[str, int] = {}
        """Samples each worker has learned since the last commit."""
        self._samples_made = 0
        self._tokens = 0
        self._busy_s = self._wait_s = 0.0
        self._began = 0.0
        self._first_step = 0
        self._last_step: int | None = None
        self._iterates = False

    def add(self, event: dict[str, Any], now: float) -> None:
        """Take an event in."""
        kind = event["event"]
        if kind == "run_started":
            self._began = now
            self.epoch, self.total_samples = event["epoch"], event["total_samples"]
            self.committed = event["samples_committed"]
            self.step = self._first_step = event["total_steps"]
            self._last_step, self._iterates = event["steps"], event["iterate"]
        elif kind == "step":
            self._add_step(event)
        elif kind == "chunk":
            self.chunks[event["worker"]] = self.chunks.get(event["worker"], 0) + 1
        elif kind == "worker_lost":
            self._pending.pop(event["worker"], None)  # went back, and comes again
        elif kind == "commit":
            self.committed += event["samples"]
            for worker in event["workers"]:
                self._pending.pop(worker, None)
        elif kind == "eval":
            self.eval_loss = event["loss"]

    def _add_step(self, event: dict[str, Any]) -> None:
        if event["epoch"] != self.epoch:
            self.epoch, self.committed = event["epoch"], 0
        self.step = max(self.step, event["step"])
        self.steps_made += 1
        self.learning_rate = event["learning_rate"]
        self._tokens += event["num_tokens"]
        self._busy_s += event["step_s"]
        self._wait_s += event["wait_s"]
        self._samples_made += event["samples_done"]
        self._pending[event["worker"]] = self._pending.get(event["worker"], 0) + event["samples_done"]
        if event["skipped"]:
            self.skipped += 1
        elif event["loss"] is not None:
            before = event["loss"] if self.loss is None else self.loss
            self.loss = _SMOOTHING * before + (1 - _SMOOTHING) * event["loss"]

    @property
    def learned(self) -> int:
        """Samples of this epoch."""
        return min(self.total_samples, self.committed + sum(self._pending.values()))

    @property
    def wait_share(self) -> float:
        """Of the workers' time, what was spent waiting for data."""
        return self._wait_s / max(1e-9, self._wait_s + self._busy_s)

    def tokens_per_s(self, now: float) -> float:
        return self._tokens / max(1e-9, now - self._began)

    def seconds_left(self, now: float) -> float | None:
        """Until the last step or the end of the epoch, whichever comes first; None where there is no telling."""
        elapsed = now - self._began
        left = []
        if self._last_step is not None and self.steps_made:
            left.append((self._last_step - self.step) * elapsed / self.steps_made)
        if not self._iterates and self._samples_made:
            left.append((self.total_samples - self.learned) * elapsed / self._samples_made)
        return max(0.0, min(left)) if left else None

    def told(self, now: float) -> str:
        loss = "none" if self.loss is None else f"{self.loss:.3f}"
        left = self.seconds_left(now)
        parts = [
            f"epoch {self.epoch}, step {self.step}, loss {loss}",
            *([f"eval {self.eval_loss:.3f}"] if self.eval_loss is not None else []),
            f"{self.tokens_per_s(now):,.0f} tokens/s",
            f"waiting for data {100 * self.wait_share:.1f} %",
            *([f"{self.skipped} skipped"] if self.skipped else []),
            *([f"{duration(left)} left"] if left is not None else []),
        ]
        return ", ".join(parts)

    def told_chunks(self) -> str:
        counts = ", ".join(f"{worker} {count}" for worker, count in sorted(self.chunks.items()))
        return f"chunks: {counts or 'none finished yet'}"


class TrainingProgress:
    """A hook that draws how a run is doing, or tells it now and then; lost workers get a line of their own."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._screen = console(stderr=True)
        self._quiet = quiet
        self._draws = self._screen.is_terminal and not quiet
        self._bar = Progress(BarColumn(), TaskProgressColumn())
        self._task = self._bar.add_task("starting", total=None)
        self._live = Live(console=self._screen, transient=True, refresh_per_second=4)
        self._gone = False
        self._tally = Tally()
        self._said_at = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        if self._draws:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._draws and not self._gone:
            self._live.stop()

    def on_event(self, event: dict[str, Any]) -> None:
        """Show an event; where nobody can see it any more, a training goes on all the same."""
        if self._gone:
            return
        try:
            self._tally.add(event, time.monotonic())
            self._show(event)
        except OSError:
            self._gone = True

    def _show(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "run_started":
            self._say_start(event)
        elif kind == "plan":
            self._say_plan(event)
        elif kind == "step":
            self._tell_step(event)
        elif kind == "worker_lost":
            self._say(f"{event['worker']} lost ({event['reason']}); its chunks went back", style="red")
        elif kind == "eval":
            self._say(f"eval at step {event['total_steps']}: loss {event['loss']}, perplexity {event['perplexity']}")
        elif kind == "commit" and not self._draws:
            self._say(f"commit {event['checkpoint_id']}: {counted(event['samples'], 'sample')} more learned")

    def _say_start(self, event: dict[str, Any]) -> None:
        resumed = f", resumed at step {event['total_steps']}" if event["total_steps"] else ""
        self._say(
            f"{event['dataset']}: {counted(event['total_samples'], 'sample')} in "
            f"{counted(event['total_blocks'], 'block')}, "
            f"model: {event['model']} in {event['precision']}, "
            f"workers: {event['workers']} on {', '.join(sorted(set(event['devices'])))}, "
            f"run: {event['run_dir']}{resumed}"
        )

    def _say_plan(self, event: dict[str, Any]) -> None:
        host, free = human_bytes(event["host_bytes"]), human_bytes(event["host_free_bytes"])
        budget = event["device_budget_bytes"]
        device = "" if budget is None else f", {human_bytes(event['device_bytes'])} of {human_bytes(budget)} on the GPU"
        stays = f", {counted(event['residents'], 'unit')} of {event['layers'] + 1} stay there" if budget else ""
        terms = ", ".join(f"{term} {event[f'{term}_s']:.3g} s" for term in ("compute", "link", "optimizer"))
        self._say(
            f"plan: {event['parameters'] / 1e9:.3g} B parameters, {host} of {free} free on the host{device}{stays}; "
            f"a step: {terms}: {event['binds']} binds"
        )

    def _tell_step(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if event["skipped"]:
            ranges = event["samples"]  # of ranks on the strided plan, `penstock audit --step` works them out
            samples = f"; samples {ranges[0][0]} to {ranges[-1][1] - 1}" if ranges else ""
            self._say(f"step {event['step']} skipped: its loss or its gradients are not numbers{samples}", style="red")
        if self._draws:
            self._bar.update(self._task, total=self._tally.total_samples, completed=self._tally.learned)
            lines = Text(self._tally.told(now)), Text(self._tally.told_chunks(), style="dim")
            self._live.update(Group(self._bar, *lines))
        elif now - self._said_at > _LINE_EVERY_S:
            self._said_at = now
            self._say(f"{self._tally.told(now)}; {self._tally.told_chunks()}")

    def _say(self, text: str, style: str | None = None) -> None:
        if not self._quiet:
            self._screen.print(text, style=style)


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"

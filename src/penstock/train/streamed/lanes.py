"""Lanes of a device: one computes, others copy in and out, each in its own order; marks are how they wait.

On the CPU there is one lane and nothing to wait for: copies are done when asked for, and marks are None.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor

Lane = Literal["compute", "in", "out", "visit in", "visit", "visit out"]
"""What is computed, its weights in and its gradients out; and the same of an optimizer's visits to the device."""
Mark = torch.cuda.Event | None
"""A point in a lane's order."""


class Lanes:
    """The lanes of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {lane: torch.cuda.Stream(device) for lane in get_args(Lane)}
            self._streams["compute"] = torch.cuda.current_stream(device)
        self._spans: dict[Lane, list[tuple[torch.cuda.Event, torch.cuda.Event] | float]] = {}
        self.forget_times()

    def mark(self, lane: Lane) -> Mark:
        """Where a lane stands."""
        if not self._streams:
            return None
        mark = torch.cuda.Event()
        mark.record(self._streams[lane])
        return mark

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Have a lane go on only behind a mark."""
        if mark is not None:
            self._streams[lane].wait_event(mark)

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """While inside, this thread's work goes to a lane."""
        return torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()

    @contextmanager
    def timed(self, lane: Lane) -> Iterator[None]:
        """What goes to a lane while inside counts as its time."""
        if not self._streams:
            began = time.perf_counter()
            yield
            self._spans[lane].append(time.perf_counter() - began)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self._streams[lane])
        yield
        end.record(self._streams[lane])
        self._spans[lane].append((begin, end))

    def forget_times(self) -> None:
        self._spans = {lane: [] for lane in get_args(Lane)}

    def seconds(self) -> dict[Lane, float]:
        """How long each lane was at work since times were forgotten; what is not done yet does not count."""
        told: dict[Lane, float] = {}
        for lane, spans in self._spans.items():
            told[lane] = 0.0
            for span in list(spans):
                if not isinstance(span, tuple):
                    told[lane] += span
                elif span[1].query():
                    told[lane] += span[0].elapsed_time(span[1]) / 1e3
        return told

    def copy(self, lane: Lane, target: Tensor, source: Tensor, *, after: Mark = None) -> Mark:
        """Copy in a lane's order, behind a mark; returns the mark behind it."""
        self.wait(lane, after)
        with self.on(lane), self.timed(lane), torch.no_grad():
            target.copy_(source, non_blocking=True)
        return self.mark(lane)


def wait_on_host(mark: Mark) -> None:
    """Stop this thread until a mark is reached."""
    if mark is not None:
        mark.synchronize()

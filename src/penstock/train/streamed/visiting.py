"""AdamW on the device for units that the host holds: weights and moments visit it, a piece at a time, and go home.

    visit in:   | piece 1 | piece 2 | piece 3 | ...        weights, moments and gradients
    visit:                | piece 1 | piece 2 | ...        the step itself
    visit out:                      | piece 1 | ...        weights, moments and the image

The link to the device is idle most of a step, and so is its memory: beside the host's own optimizer, which the host's
memory and cores limit, this steps about as many weights again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.train.optimizers import AdamSettings
from penstock.train.streamed.background import Background
from penstock.train.streamed.due import Due, DueStep, StepOrder
from penstock.train.streamed.host import HostGradients, HostState
from penstock.train.streamed.lanes import Lanes, Mark, wait_on_host
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.sharing import Sharing
from penstock.train.streamed.stepping import fused_adamw

PIECE = 1 << 23
"""Numbers that visit at a time."""
_SLOTS = 3


@dataclass(slots=True, kw_only=True)
class _Slot:
    weights: Tensor
    mean: Tensor
    square: Tensor
    gradients: Tensor
    free: Mark = None


class VisitingAdam:
    """Steps units of the host on the device. Given work by one thread."""

    def __init__(
        self,
        state: HostState,
        gradients: HostGradients,
        sharing: Sharing,
        adam: AdamSettings,
        lanes: Lanes,
        *,
        piece: int = PIECE,
    ) -> None:
        self._state = state
        self._gradients = gradients
        self._sharing = sharing
        self._adam = adam
        self._lanes = lanes
        self._piece = piece
        self._slots: deque[_Slot] = deque()
        self._under_way: deque[tuple[Unit, Mark]] = deque()
        self._registered: set[int] = set()
        self.busy_s = 0.0
        self._thread = Background("visiting optimizer", idle=self._see_all_home, on_failure=sharing.fail)

    @staticmethod
    def num_bytes(gradients: torch.dtype) -> int:
        """Of the device's memory."""
        return _SLOTS * PIECE * (12 + gradients.itemsize) + 4 * PIECE + 2 * PIECE

    def expect(self, unit: Unit) -> None:
        """A unit will visit from now on: its weights and moments are registered with CUDA."""
        if self._lanes.device.type == "cuda" and unit.index not in self._registered:
            self._registered.add(unit.index)
            host = self._state.units[unit.index]
            for array in (host.weights, host.mean, host.square):
                if array is not host.image:
                    self._state.memory.register(array)

    def help_with(self, due: Due) -> None:
        """Step units as long as some are due that may visit."""
        self._thread.give(lambda: self._step_all(due))

    def wait(self) -> None:
        """Until everything given is done."""
        self._thread.wait()

    def close(self) -> None:
        self._thread.close()

    def _step_all(self, due: Due) -> None:
        while (step := due.take(visiting=True)) is not None:
            self._step(step)

    @torch.no_grad()
    def _step(self, step: DueStep) -> None:
        began, unit, last = time.perf_counter(), step.unit, None
        self._lanes.wait("visit in", step.arrived)
        for segment, decays in unit.segments(step.part):
            for start in range(segment.start, segment.stop, self._piece):
                piece = slice(start, min(start + self._piece, segment.stop))
                last = self._visit(unit, piece, step.order, decays=decays)
        self._under_way.append((unit, last))
        while len(self._under_way) > 1:
            self._see_home()
        self.busy_s += time.perf_counter() - began

    def _visit(self, unit: Unit, part: slice, order: StepOrder, *, decays: bool) -> Mark:
        lanes, host, size = self._lanes, self._state.units[unit.index], part.stop - part.start
        slot = self._next_slot(self._gradients.units[unit.index].dtype)
        weights, mean, square, gradients = (
            array[:size] for array in (slot.weights, slot.mean, slot.square, slot.gradients)
        )
        lanes.wait("visit in", slot.free)
        with lanes.on("visit in"), lanes.timed("visit in"):
            gradients.copy_(self._gradients.units[unit.index][part], non_blocking=True)
            weights.copy_(host.weights[part], non_blocking=True)
            mean.copy_(host.mean[part], non_blocking=True)
            square.copy_(host.square[part], non_blocking=True)
        lanes.wait("visit", lanes.mark("visit in"))
        with lanes.on("visit"):
            fused_adamw(weights, gradients.float(), mean, square, order, self._adam, decays=decays)
            image = weights.to(host.image.dtype) if host.image is not host.weights else None
            stepped = lanes.mark("visit")
        lanes.wait("visit out", stepped)
        with lanes.on("visit out"), lanes.timed("visit out"):
            if image is not None:
                host.image[part].copy_(image, non_blocking=True)
                if image.is_cuda:
                    image.record_stream(torch.cuda.current_stream(lanes.device))
            host.weights[part].copy_(weights, non_blocking=True)
            host.mean[part].copy_(mean, non_blocking=True)
            host.square[part].copy_(square, non_blocking=True)
        slot.free = lanes.mark("visit out")
        return slot.free

    def _next_slot(self, gradients: torch.dtype) -> _Slot:
        if len(self._slots) == _SLOTS:
            slot = self._slots.popleft()
        else:
            weights, mean, square = (torch.empty(self._piece, device=self._lanes.device) for _ in range(3))
            room = torch.empty(self._piece, dtype=gradients, device=self._lanes.device)
            free = self._lanes.mark("compute")  # which may be using this memory for what it had there before
            slot = _Slot(weights=weights, mean=mean, square=square, gradients=room, free=free)
        self._slots.append(slot)
        return slot

    def _see_home(self) -> None:
        unit, mark = self._under_way.popleft()
        wait_on_host(mark)
        self._sharing.stepped(unit)

    def _see_all_home(self) -> None:
        began = time.perf_counter()
        while self._under_way:
            self._see_home()
        self.busy_s += time.perf_counter() - began

"""Gradients as the device makes them: packed as their unit is laid out, measured, and sent to the host.

Where a unit's gradients are made in several parts (parts of a batch, tiles of the vocabulary) they are added up in
fp32; where they are made at once they are sent in the type they were made in, which loses nothing and halves the way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.train.streamed.host import HostGradients
from penstock.train.streamed.lanes import Lanes, Mark
from penstock.train.streamed.layout import Unit


@dataclass(slots=True)
class _Slot:
    flat: Tensor
    sent: Mark = None


class Collector:
    """Packs and sends the gradients of one unit at a time, besides those of units that have room of their own."""

    def __init__(self, units: list[Unit], host: HostGradients, lanes: Lanes, *, slots: int) -> None:
        """Make room for some units on their way.

        Args:
            units: All of them; the first, the edge, is collected all through a step and has a place of its own.
            host: Where gradients go.
            lanes: Of the device.
            slots: How many units may be under way at a time.
        """
        self._host = host
        self._lanes = lanes
        self._slots: deque[_Slot] = deque()
        largest = max(units[1:], key=lambda unit: unit.size)
        for _ in range(slots):
            dtype = host.units[largest.index].dtype
            self._slots.append(_Slot(torch.zeros(largest.size, dtype=dtype, device=lanes.device)))
        self._edge: _Slot | None = None
        self._open: dict[int, tuple[_Slot | None, Tensor]] = {}
        self.norm_squared = torch.zeros((), dtype=torch.float64, device=lanes.device)

    def begin(self, unit: Unit, own: Tensor | None = None) -> None:
        """Gradients of a unit come now.

        Args:
            unit: Which one.
            own: Where to collect them, for a unit that stays on the device; they are not sent then.
        """
        slot = None
        if own is None:
            slot = self._edge_slot() if unit.index == 0 else self._slots.popleft()
            self._lanes.wait("compute", slot.sent)
        flat = (slot.flat if slot is not None else own)[: unit.size]  # pyright: ignore[reportOptionalSubscript]
        flat.zero_()  # gaps between parameters too, and parameters without a gradient
        self._open[unit.index] = (slot, flat)

    @torch.no_grad()
    def add(self, unit: Unit) -> None:
        """Take the gradients that its parameters have now; they have none then."""
        _, flat = self._open[unit.index]
        places = [place for place in unit.places if place.parameter.grad is not None]
        made = [place.parameter.grad for place in places if place.parameter.grad is not None]
        targets = [place.of(flat) for place in places]
        if all(each.dtype == flat.dtype for each in made):
            if made:
                torch._foreach_add_(targets, made)  # pyright: ignore
        else:  # widened as they are added: no copy in fp32 is made
            for target, each in zip(targets, made, strict=True):
                target.add_(each)
        for place in places:
            place.parameter.grad = None

    @torch.no_grad()
    def end(self, unit: Unit, *, measured: bool) -> Mark:
        """All gradients of a unit are there; returns the mark behind their way to the host, where they have one."""
        slot, flat = self._open.pop(unit.index)
        if measured:
            self.norm_squared += torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
        if slot is None:
            return None
        slot.sent = self._lanes.copy("out", self._host.units[unit.index], flat, after=self._lanes.mark("compute"))
        if slot is not self._edge:
            self._slots.append(slot)
        return slot.sent

    def _edge_slot(self) -> _Slot:
        if self._edge is None:
            edge = self._host.units[0]
            self._edge = _Slot(torch.zeros(len(edge), dtype=edge.dtype, device=self._lanes.device))
        return self._edge

    def drop_edge(self) -> None:
        """The edge has room of its own from now on."""
        self._edge = None

    def forget(self) -> None:
        """What was begun is not wanted any more."""
        self._slots.extend(slot for slot, _ in self._open.values() if slot is not None and slot is not self._edge)
        self._open.clear()
        self.norm_squared.zero_()

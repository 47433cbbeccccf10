"""Units that stay on the device for good, with gradients, weights and moments: nothing of them is moved, or stepped by
the host. What the memory budget allows is spent on them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.train.optimizers import AdamSettings
from penstock.train.streamed.due import StepOrder
from penstock.train.streamed.halves import joined, split
from penstock.train.streamed.host import HostUnit
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.stepping import fused_adamw

_PIECE = 1 << 24
"""Numbers stepped at a time: as many weights and gradients are made fp32."""


class Resident:
    """One unit on the device."""

    def __init__(self, unit: Unit, host: HostUnit, device: torch.device, gradients: torch.dtype) -> None:
        """Take a unit over from the host, whose arrays are out of date from now on."""
        self.unit = unit
        self._host = host
        self._mean, self._square = host.mean.to(device, copy=True), host.square.to(device, copy=True)
        self.image, self._lower = self._take(device)
        self._device, self._dtype = device, gradients
        self._gradients: Tensor | None = None

    def _take(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        host = self._host
        if host.image is host.weights:
            return host.weights.to(device, copy=True), None
        image, lower = (
            torch.empty_like(host.image, device=device),
            torch.empty_like(host.image, dtype=torch.int16, device=device),
        )
        for part in _pieces(slice(0, self.unit.size)):
            split(host.weights[part].to(device), image[part], lower[part])
        return image, lower

    @staticmethod
    def num_bytes(unit: Unit, gradients: torch.dtype) -> int:
        return unit.size * (12 + gradients.itemsize)

    def room(self) -> Tensor:
        """For gradients: from when they are made until they are let go of, so that others have it in the meantime."""
        if self._gradients is None:
            self._gradients = torch.zeros(self.unit.size, dtype=self._dtype, device=self._device)
        return self._gradients

    def let_go(self) -> None:
        """Of gradients."""
        self._gradients = None

    @torch.no_grad()
    def step(self, order: StepOrder, adam: AdamSettings) -> None:
        for segment, decays in self.unit.segments(slice(0, self.unit.size)):
            for part in _pieces(segment):
                weights = self._weights(part)
                gradients = self.room()[part].float()  # a copy, where they are narrower
                fused_adamw(weights, gradients, self._mean[part], self._square[part], order, adam, decays=decays)
                if self._lower is not None:
                    split(weights, self.image[part], self._lower[part])

    def _weights(self, part: slice) -> Tensor:
        return self.image[part] if self._lower is None else joined(self.image[part], self._lower[part])

    @torch.no_grad()
    def give_back(self) -> None:
        """Write everything to the host, which is up to date then."""
        for part in _pieces(slice(0, self.unit.size)):
            self._host.weights[part].copy_(self._weights(part))
            if self._lower is not None:
                self._host.image[part].copy_(self.image[part])
        self._host.mean.copy_(self._mean)
        self._host.square.copy_(self._square)


def _pieces(whole: slice) -> list[slice]:
    return [slice(start, min(start + _PIECE, whole.stop)) for start in range(whole.start, whole.stop, _PIECE)]

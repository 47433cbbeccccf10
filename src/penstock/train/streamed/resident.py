"""Units that stay on the device for good, with gradients, weights and moments: nothing of them is moved, or stepped by
the host. What the memory budget allows is spent on them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.train.optimizers import AdamSettings
from penstock.train.streamed.host import HostUnit
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.stepping import StepOrder, fused_adamw

_PIECE = 1 << 25
"""Numbers stepped at a time: as many gradients are made fp32."""


class Resident:
    """One unit on the device."""

    def __init__(self, unit: Unit, host: HostUnit, device: torch.device, gradients: torch.dtype) -> None:
        """Take a unit over from the host, whose arrays are out of date from now on."""
        self.unit = unit
        self._host = host
        self.weights, self.mean, self.square = (
            array.to(device, copy=True) for array in (host.weights, host.mean, host.square)
        )
        own_image = host.image is not host.weights
        self.image = self.weights.to(host.image.dtype) if own_image else self.weights
        self.gradients = torch.zeros(unit.size, dtype=gradients, device=device)

    @staticmethod
    def num_bytes(unit: Unit, image: torch.dtype, gradients: torch.dtype) -> int:
        own_image = image.itemsize if image != torch.float32 else 0
        return unit.size * (12 + own_image + gradients.itemsize)

    @torch.no_grad()
    def step(self, order: StepOrder, adam: AdamSettings) -> None:
        for segment, decays in self.unit.segments(slice(0, self.unit.size)):
            for start in range(segment.start, segment.stop, _PIECE):
                part = slice(start, min(start + _PIECE, segment.stop))
                gradients = self.gradients[part].float()  # a copy, where they are narrower
                fused_adamw(
                    self.weights[part], gradients, self.mean[part], self.square[part], order, adam, decays=decays
                )
        if self.image is not self.weights:
            self.image.copy_(self.weights)

    @torch.no_grad()
    def give_back(self) -> None:
        """Write everything to the host, which is up to date then."""
        pairs: list[tuple[Tensor, Tensor]] = [
            (self._host.weights, self.weights),
            (self._host.mean, self.mean),
            (self._host.square, self.square),
        ]
        if self.image is not self.weights:
            pairs.append((self._host.image, self.image))
        for host, own in pairs:
            host.copy_(own)

"""Saved tensors in the host's memory: what going back needs leaves the device, and comes back when it is its turn."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_WORTH_BYTES = 1 << 16
"""Smaller tensors stay: copying them costs more than they take."""


class OffloadSaved(saved_tensors_hooks):
    """While inside, what is saved for going back is kept on the host; pinned where the device is CUDA.

    Weights stay where they are: they are on the device anyway. On the CPU nothing is copied.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        stays = tensor.device.type == "cpu" or tensor.nbytes < _WORTH_BYTES
        if stays or tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.device, tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        host.copy_(tensor)  # waits: the tensor may be gone or changed as soon as this returns
        return tensor.device, host


def _unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)

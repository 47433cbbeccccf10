"""The keys and values of a sequence's chunks, by layer, and the gradients that later chunks have for them.

All tensors are ``(sequences, length, heads, dim)``: a run of tokens is one piece of memory. Buffers are kept for the
next batch of the same size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.train.long.kernels import Reach


class Memory(Protocol):
    """What attention over chunks is kept in. One batch at a time; one thread at a time."""

    def begin(self, sequences: int, length: int) -> None:
        """Forget the last batch; `length` tokens are coming."""
        ...

    def store(self, layer: int, keys: Tensor, values: Tensor, reach: Reach) -> None:
        """Keep a chunk's own keys and values."""
        ...

    def recall(self, layer: int, reach: Reach) -> tuple[Tensor, Tensor]:
        """Keys and values that a chunk reaches, its own included, on the device; valid until two layers later."""
        ...

    def recall_backward(self, layer: int, reach: Reach) -> tuple[Tensor, Tensor]:
        """The same, when layers come from the last to the first."""
        ...

    def settle(self, layer: int, reach: Reach, key_grads: Tensor, value_grads: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the gradients of all that a chunk reaches.

        Returns:
            The gradients of the chunk's own keys and values: of itself and of all later chunks.
        """
        ...


class Buffers:
    """Of one layer: keys, values, and what has gathered for them."""

    def __init__(self, length: int, keys: Tensor, values: Tensor, device: torch.device) -> None:
        """Make room.

        Args:
            length: Tokens of a sequence.
            keys: Some, for their shape and type.
            values: Some.
            device: Where; host memory is pinned where the device copies from it.
        """
        pinned = device.type == "cpu" and keys.device.type == "cuda"
        self.keys, self.values = (
            torch.empty((len(like), length, *like.shape[2:]), dtype=like.dtype, device=device, pin_memory=pinned)
            for like in (keys, values)
        )
        self._pinned = pinned
        self._grads: tuple[Tensor, Tensor] | None = None

    @property
    def grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values, in fp32 at least; made on first use, with anything in them."""
        if self._grads is None:
            self._grads = _grads_like(self.keys, self._pinned), _grads_like(self.values, self._pinned)
        return self._grads

    def fits(self, sequences: int, length: int, keys: Tensor, values: Tensor) -> bool:
        """Whether a batch's keys and values have room here."""
        return (
            self.keys.shape[:2] == (sequences, length)
            and self.keys.shape[2:] == keys.shape[2:]
            and self.values.shape[2:] == values.shape[2:]
            and self.keys.dtype == keys.dtype
            and self.values.dtype == values.dtype
        )


def grad_type(dtype: torch.dtype) -> torch.dtype:
    """What gradients are gathered in: many are added up."""
    return torch.promote_types(dtype, torch.float32)


def _grads_like(tensor: Tensor, pinned: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=grad_type(tensor.dtype), device=tensor.device, pin_memory=pinned)


class DeviceMemory:
    """Everything on the device: as many bytes as keys and values are, and in training twice or thrice that."""

    def __init__(self) -> None:
        self._layers: dict[int, Buffers] = {}
        self._fresh: set[int] = set()
        self._size = 0, 0

    def begin(self, sequences: int, length: int) -> None:
        self._size = sequences, length
        self._fresh = set(self._layers)

    def store(self, layer: int, keys: Tensor, values: Tensor, reach: Reach) -> None:
        room = self._layers.get(layer)
        if room is None or not room.fits(*self._size, keys, values):
            self._layers.pop(layer, None)  # before there are two
            room = self._layers[layer] = Buffers(self._size[1], keys, values, keys.device)
            self._fresh.add(layer)
        room.keys[:, reach.start : reach.stop].copy_(keys)
        room.values[:, reach.start : reach.stop].copy_(values)

    def recall(self, layer: int, reach: Reach) -> tuple[Tensor, Tensor]:
        room = self._layers[layer]
        return room.keys[:, reach.first_key : reach.stop], room.values[:, reach.first_key : reach.stop]

    recall_backward = recall

    def settle(self, layer: int, reach: Reach, key_grads: Tensor, value_grads: Tensor) -> tuple[Tensor, Tensor]:
        room = self._layers[layer]
        own: list[Tensor] = []
        for gathered, added in zip(room.grads, (key_grads, value_grads), strict=True):
            if layer in self._fresh:
                gathered[:, : reach.stop].zero_()
            gathered[:, reach.first_key : reach.stop] += added
            own.append(gathered[:, reach.start : reach.stop].to(added.dtype, copy=True))
        self._fresh.discard(layer)
        return own[0], own[1]

"""Keys, values and their gradients in host memory, two layers of them at a time on the device.

    compute     attend 0 | attend 1 | attend 2        layers in order; backward, in reverse order
    copy in     keys 1   | keys 2   | keys 3          while the layer before is computed
    copy out    new 0    | new 1    | new 2           a chunk's own keys and values; backward, gathered gradients

Two slots on the device serve the layers in turn. Copies have streams of their own; events say when a slot or a place in
host memory may be read or written again. Host memory is pinned, and kept for the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.train.long.kernels import Reach
from penstock.train.long.memory import Buffers, grad_type

_SLOTS = 2


class HostMemory:
    """Keys and values on the host. Layers are asked for in order, backward in reverse order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._incoming = torch.cuda.Stream(device)
        self._outgoing = torch.cuda.Stream(device)
        self._slots = [_Slot(device) for _ in range(_SLOTS)]
        self._layers: dict[int, Buffers] = {}
        self._windows: dict[int, int | None] = {}
        self._written: dict[int, torch.cuda.Event] = {}
        """By layer, when what was last copied to the host is there."""
        self._fresh: set[int] = set()
        """Layers for whose keys and values nothing has gathered yet."""
        self._size = 0, 0

    def begin(self, sequences: int, length: int) -> None:
        self._size = sequences, length
        self._fresh = set(self._layers)
        for slot in self._slots:
            slot.forget()

    def store(self, layer: int, keys: Tensor, values: Tensor, reach: Reach) -> None:
        room = self._layers.get(layer)
        if room is None or not room.fits(*self._size, keys, values):
            torch.cuda.synchronize(self._device)  # what is let go may still be copied
            room = self._layers[layer] = Buffers(self._size[1], keys, values, torch.device("cpu"))
            self._fresh.add(layer)
        self._windows[layer] = reach.window
        slot = self._slot(layer)
        self._bring(layer, reach.first_key, reach.start)
        tokens = slice(reach.start, reach.stop)
        torch.cuda.current_stream(self._device).wait_event(slot.arrived)
        for here, given in zip(slot.known, (keys, values), strict=True):
            here[:, tokens].copy_(given)
        slot.holds = layer, reach.first_key, reach.stop
        self._send(layer, slot, (room.keys, room.values), slot.known, tokens)

    def recall(self, layer: int, reach: Reach) -> tuple[Tensor, Tensor]:
        slot = self._slot(layer)
        following = layer + 1
        if following in self._windows:
            first = replace(reach, window=self._windows[following]).first_key
            self._bring(following, first, reach.start)
        return slot.tokens(reach.first_key, reach.stop)

    def recall_backward(self, layer: int, reach: Reach) -> tuple[Tensor, Tensor]:
        self._bring(layer, reach.first_key, reach.stop)
        self._bring_grads(layer, reach)
        slot = self._slot(layer)
        torch.cuda.current_stream(self._device).wait_event(slot.arrived)
        if layer - 1 in self._windows:
            before = replace(reach, window=self._windows[layer - 1])
            self._bring(layer - 1, before.first_key, reach.stop)
            self._bring_grads(layer - 1, before)
        return slot.tokens(reach.first_key, reach.stop)

    def settle(self, layer: int, reach: Reach, key_grads: Tensor, value_grads: Tensor) -> tuple[Tensor, Tensor]:
        slot = self._slot(layer)
        own: list[Tensor] = []
        for gathered, added in zip(slot.grads, (key_grads, value_grads), strict=True):
            gathered[:, reach.first_key : reach.stop] += added
            own.append(gathered[:, reach.start : reach.stop].to(added.dtype, copy=True))
        first = 0 if layer in self._fresh else reach.first_key
        self._fresh.discard(layer)
        self._send(layer, slot, self._layers[layer].grads, slot.grads, slice(first, reach.start))
        slot.holds_grads = None
        return own[0], own[1]

    def _slot(self, layer: int) -> _Slot:
        return self._slots[layer % _SLOTS]

    def _bring(self, layer: int, first: int, stop: int) -> None:
        """Have a layer's keys and values come to its slot, unless they are there or on their way."""
        slot, room = self._slot(layer), self._layers[layer]
        if slot.holds is not None and slot.holds[0] == layer and slot.holds[1] <= first and slot.holds[2] == stop:
            return
        slot.make_room(room)
        self._copy_in(layer, slot, slot.known, (room.keys, room.values), slice(first, stop))
        slot.holds = layer, first, stop

    def _bring_grads(self, layer: int, reach: Reach) -> None:
        """The same of what has gathered for them; nothing, on the first chunk back."""
        slot, room = self._slot(layer), self._layers[layer]
        wanted = layer, reach.first_key, reach.stop
        if slot.holds_grads == wanted:
            return
        slot.make_room_for_grads(room)
        if layer in self._fresh:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(slot.sent)
            for gathered in slot.grads:
                gathered[:, : reach.stop].zero_()
        else:
            self._copy_in(layer, slot, slot.grads, room.grads, slice(reach.first_key, reach.stop))
        slot.holds_grads = wanted

    def _copy_in(
        self, layer: int, slot: _Slot, into: Sequence[Tensor], out_of: Sequence[Tensor], tokens: slice
    ) -> None:
        """Copy from the host once it has it, and once nobody uses what was in the slot."""
        if tokens.start < tokens.stop:
            self._incoming.wait_stream(torch.cuda.current_stream(self._device))
            self._incoming.wait_event(slot.sent)
            if layer in self._written:
                self._incoming.wait_event(self._written[layer])
            with torch.cuda.stream(self._incoming):
                _copy(into, out_of, tokens)
        slot.arrived.record(self._incoming)

    def _send(self, layer: int, slot: _Slot, into: Sequence[Tensor], out_of: Sequence[Tensor], tokens: slice) -> None:
        """Copy to the host, once it is computed."""
        if tokens.start < tokens.stop:
            self._outgoing.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._outgoing):
                _copy(into, out_of, tokens)
        slot.sent.record(self._outgoing)
        self._written.setdefault(layer, torch.cuda.Event()).record(self._outgoing)


class _Slot:
    """Room for one layer on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[str, Tensor] = {}
        self.known: tuple[Tensor, ...] = ()
        """Keys and values,"""
        self.grads: tuple[Tensor, ...] = ()
        """and their gradients, in the backward pass."""
        self.holds: tuple[int, int, int] | None = None
        """The layer whose keys and values are here or on their way, and of which tokens;"""
        self.holds_grads: tuple[int, int, int] | None = None
        """and the same of the gradients."""
        self.arrived = torch.cuda.Event()
        """When what is on its way in is here;"""
        self.sent = torch.cuda.Event()
        """when what is on its way out has left."""

    def forget(self) -> None:
        self.holds = self.holds_grads = None

    def tokens(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = (known[:, first:stop] for known in self.known)
        return keys, values

    def make_room(self, like: Buffers) -> None:
        self.holds = None
        self.known = self._laid("keys", like.keys), self._laid("values", like.values)

    def make_room_for_grads(self, like: Buffers) -> None:
        self.holds_grads = None
        self.grads = (
            self._laid("key_grads", like.keys, grad_type(like.keys.dtype)),
            self._laid("value_grads", like.values, grad_type(like.values.dtype)),
        )

    def _laid(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of the slot as a tensor of a layer's shape; layers may differ."""
        dtype = dtype or like.dtype
        wanted = like.numel() * dtype.itemsize
        room = self._rooms.get(name)
        if room is None or room.numel() < wanted:
            torch.cuda.synchronize(self._device)  # what is let go may still be copied
            room = self._rooms[name] = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        return room[:wanted].view(dtype).view(like.shape)


def _copy(into: Sequence[Tensor], out_of: Sequence[Tensor], tokens: slice) -> None:
    """Copy a run of tokens, sequence by sequence: each is one piece of memory."""
    for target, source in zip(into, out_of, strict=True):
        for row_into, row_out_of in zip(target, source, strict=True):
            row_into[tokens].copy_(row_out_of[tokens], non_blocking=True)

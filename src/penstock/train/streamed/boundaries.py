"""States between layers, kept from the forward to the backward pass: on the device, or on the host by choice."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.train.streamed.lanes import Lanes, Mark


class Boundaries:
    """What went into every layer, by layer and part of the batch. Taken back in the reverse order, each once."""

    def __init__(self, lanes: Lanes, *, on_host: bool) -> None:
        self._lanes = lanes
        self._on_host = on_host and lanes.device.type != "cpu"
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._sent: dict[tuple[int, int], Mark] = {}
        self._coming: dict[tuple[int, int], tuple[Tensor, Mark]] = {}
        self._pool: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def keep(self, layer: int, part: int, states: Tensor) -> None:
        place = layer, part
        if not self._on_host:
            self._kept[place] = states
            return
        spare = self._pool.setdefault((states.shape, states.dtype), [])
        host = spare.pop() if spare else torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        self._sent[place] = self._lanes.copy("out", host, states, after=self._lanes.mark("compute"))
        self._kept[place] = host
        with self._lanes.on("out"):
            states.record_stream(torch.cuda.current_stream(self._lanes.device))

    def expect(self, layer: int) -> None:
        """A layer's states will be taken soon: bring them back."""
        if not self._on_host:
            return
        for place in [place for place in self._kept if place[0] == layer and place not in self._coming]:
            host = self._kept[place]
            with self._lanes.on("in"):
                states = torch.empty_like(host, device=self._lanes.device)
            self._coming[place] = states, self._lanes.copy("in", states, host, after=self._sent[place])

    def take(self, layer: int, part: int) -> Tensor:
        place = layer, part
        if not self._on_host:
            return self._kept.pop(place)
        if place not in self._coming:
            self.expect(layer)
        states, come = self._coming.pop(place)
        self._lanes.wait("compute", come)
        states.record_stream(torch.cuda.current_stream(self._lanes.device))
        host = self._kept.pop(place)
        self._pool[(host.shape, host.dtype)].append(host)
        return states

    def forget(self) -> None:
        self._kept.clear()
        self._sent.clear()
        self._coming.clear()

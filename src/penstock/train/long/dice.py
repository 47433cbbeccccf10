"""Random numbers (dropout) that are drawn again as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Dice:
    """The random numbers of every chunk, for when it is computed a second time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: dict[int, tuple[Tensor, ...]] = {}
        self.idle = False
        """Whether a chunk has been computed and has drawn none: none does, then."""

    @contextmanager
    def noted(self, chunk: int) -> Iterator[None]:
        """While inside, a chunk is computed for the first time."""
        if self.idle:
            yield
            return
        before = self._noted[chunk] = random_state(self._device)
        yield
        if len(self._noted) == 1:
            after = random_state(self._device)
            self.idle = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    @contextmanager
    def as_noted(self, chunk: int) -> Iterator[None]:
        """While inside, a chunk draws what it drew before, if it was computed before."""
        if self.idle or chunk not in self._noted:
            yield
            return
        with replayed(self._noted[chunk], self._device):
            yield


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Where the random numbers of the CPU, and of a device that has its own, are now."""
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


@contextmanager
def replayed(states: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """Draw from these states, and afterwards as if nothing had been."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield

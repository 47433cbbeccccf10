"""All weights of a model end to end: one vector, in an order that everybody shares."""

from __future__ import annotations

import math

import torch
from blake3 import blake3
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.exchange.artifacts import raw

Layout = tuple[tuple[str, tuple[int, ...]], ...]


class WeightVector:
    """A model's weights as one vector in fp32 on the CPU, and the way between the two."""

    def __init__(self, network: nn.Module) -> None:
        self._tensors = _distinct(network)
        self.layout: Layout = tuple((name, tuple(tensor.shape)) for name, tensor in self._tensors)
        self.count = sum(tensor.numel() for _, tensor in self._tensors)

    def refuse_other(self, layout: Layout, where: str) -> None:
        if self.layout != layout:
            different = sorted({name for name, _ in set(self.layout) ^ set(layout)}) or ["their order"]
            raise ConfigError(
                f"the model here is another than that of {where}: {', '.join(different[:3])} differ: use the version "
                "of penstock, and of transformers, that the run was begun with"
            )

    @torch.no_grad()
    def read(self) -> Tensor:
        """A copy of the weights."""
        return torch.cat([tensor.detach().reshape(-1).cpu() for _, tensor in self._tensors])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Have the model's weights be these."""
        for (_, tensor), part in zip(self._tensors, self._split(vector), strict=True):
            tensor.copy_(part.view(tensor.shape))

    @torch.no_grad()
    def gradients(self) -> Tensor:
        """The gradients of the weights, 0 for those that have none."""
        parts = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for _, tensor in self._tensors]
        return torch.cat([part.reshape(-1).cpu() for part in parts])

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return _split(self.layout, vector)


def named_weights(layout: Layout, vector: Tensor) -> dict[str, Tensor]:
    """Weights by the model's own names, as views of a vector."""
    parts = zip(layout, _split(layout, vector), strict=True)
    return {name: part.view(shape) for (name, shape), part in parts}


def _split(layout: Layout, vector: Tensor) -> tuple[Tensor, ...]:
    return vector.split([math.prod(shape) for _, shape in layout])


def digest_of(weights: Tensor) -> str:
    """What a replica's weights are told by."""
    return blake3(raw(weights.numpy())).hexdigest()


def _distinct(network: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors of numbers with a point by name; those that are one and the same by their first name alone."""
    seen: set[tuple[int, torch.Size]] = set()
    kept: list[tuple[str, Tensor]] = []
    for name, tensor in network.state_dict(keep_vars=True).items():
        place = tensor.data_ptr(), tensor.shape
        if not tensor.is_floating_point() or place in seen:
            continue
        if tensor.dtype != torch.float32:
            raise ConfigError(f"weight {name} is {tensor.dtype}: expected float32")
        seen.add(place)
        kept.append((name, tensor))
    return kept

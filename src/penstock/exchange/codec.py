"""Compression: what a contribution is on the wire, and how contributions become one change of the weights.

    delta (fp32, all weights end to end) ── chunks of side x side ── cosine transform ──► coefficients
    memory = momentum * memory + coefficients ──► the top k of each chunk ──► 8-bit values, packed places, a scale
    memory - what was sent: error feedback, so that nothing is lost, only late

    contributions ── checked ── added to one buffer of coefficients, one by one ──► one inverse transform ──► change

Folding happens among coefficients, so sixteen contributions cost sixteen small scatters and one transform, and one
buffer of memory. The transform is orthonormal: norms are the same on both sides. Only the aggregator transforms back;
what it publishes is the change itself, so replicas are identical to the bit whatever hardware they are on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ArtifactRejected
from penstock.exchange.artifacts import Shapes, Tensors
from penstock.exchange.bits import Planes, bits_for, numbers_of, pack_bits, packed_bytes, rising, unpack_planes
from penstock.exchange.settings import ExchangeSettings

_LARGEST_INT8 = 127
_BLOCK = 256
"""Weights that share a scale in an 8-bit aggregate."""
_NORM_BLOCK = 4096
_LARGEST_SQUARE = float(np.finfo(np.float32).max) ** 2


class ContributionCodec(ABC):
    """From a change of all weights to tensors, and back to the sum of many. Holds no state but its sizes."""

    shapes: Shapes
    """What a contribution holds; with it, its size is known before anything is read."""

    @abstractmethod
    def new_memory(self, device: torch.device | None = None) -> Tensor:
        """What a miner has not sent yet: nothing."""

    @abstractmethod
    def encode(self, delta: Tensor, memory: Tensor) -> Tensors:
        """Make a contribution of a change, and take what it holds out of the memory, in place."""

    @abstractmethod
    def check(self, tensors: Tensors) -> float:
        """Refuse what is not finite or leads elsewhere; the norm of what it stands for."""

    @abstractmethod
    def new_total(self) -> Tensor:
        """A sum of no contributions."""

    @abstractmethod
    def fold(self, total: Tensor, tensors: Tensors) -> None:
        """Add a contribution that was checked, in place."""

    @abstractmethod
    def finish(self, total: Tensor, factor: float) -> Tensor:
        """The sum, times a factor, as a change of all weights."""


def make_codec(settings: ExchangeSettings, num_weights: int) -> ContributionCodec:
    if settings.codec == "dense":
        return DenseCodec(num_weights)
    return SparseCodec(
        num_weights,
        side=settings.chunk_side,
        top_k=settings.top_k,
        momentum=settings.momentum,
        transform=settings.codec == "dct",
    )


class DenseCodec(ContributionCodec):
    """All values in fp32: what the others are measured by."""

    def __init__(self, num_weights: int) -> None:
        self._count = num_weights
        self.shapes = {"values": ("F32", (num_weights,))}

    def new_memory(self, device: torch.device | None = None) -> Tensor:
        return torch.zeros(0, device=device)

    def encode(self, delta: Tensor, memory: Tensor) -> Tensors:
        return {"values": delta.detach().cpu().numpy()}

    def check(self, tensors: Tensors) -> float:
        return _finite_norm(tensors["values"], "values")

    def new_total(self) -> Tensor:
        return torch.zeros(self._count)

    def fold(self, total: Tensor, tensors: Tensors) -> None:
        np.add(total.numpy(), tensors["values"], out=total.numpy())

    def finish(self, total: Tensor, factor: float) -> Tensor:
        return total.mul_(factor)


class SparseCodec(ContributionCodec):
    """The largest values of each chunk, or of its cosine transform."""

    def __init__(self, num_weights: int, *, side: int, top_k: int, momentum: float, transform: bool) -> None:
        self._count = num_weights
        self._side = side
        self._chunk = side * side
        self._chunks = -(-num_weights // self._chunk)
        self._top_k = top_k
        self._momentum = momentum
        self._bits = bits_for(self._chunk)
        self._basis = _cosines(side) if transform else None
        self.shapes = {
            "places": ("U8", (packed_bytes(self._chunks * top_k, self._bits),)),
            "scales": ("F32", (self._chunks,)),
            "values": ("I8", (self._chunks, top_k)),
        }

    def new_memory(self, device: torch.device | None = None) -> Tensor:
        return torch.zeros(self._chunks, self._chunk, device=device)

    def encode(self, delta: Tensor, memory: Tensor) -> Tensors:
        memory.mul_(self._momentum).add_(self._coefficients(delta.detach()))
        places = memory.abs().topk(self._top_k, dim=1, sorted=False).indices.sort(dim=1).values
        found = memory.gather(1, places)
        scales = found.abs().amax(dim=1) / _LARGEST_INT8
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
        values = (found / divisors[:, None]).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8)
        memory.scatter_add_(1, places, values * -scales[:, None])
        return {
            "places": pack_bits(places.cpu().numpy(), self._bits),
            "scales": scales.cpu().numpy(),
            "values": values.to(torch.int8).cpu().numpy(),
        }

    def check(self, tensors: Tensors) -> float:
        scales, values = tensors["scales"], tensors["values"]
        self._check_places(self._planes(tensors["places"]), values)
        numbers = values.astype(np.float32)
        squares = np.vecdot(numbers, numbers)  # whole numbers below 2**24: exact
        total = float(np.dot(squares, np.square(scales, dtype=np.float64)))
        if not math.isfinite(total):  # a scale that is not finite makes it so, whatever it is multiplied by
            raise ArtifactRejected("not finite", "scales hold numbers that are not finite")
        if scales.min(initial=0) < 0:
            raise ArtifactRejected("malformed", "scales hold numbers below 0")
        if total > _LARGEST_SQUARE:
            raise ArtifactRejected("norm", "its norm is more than fp32 holds")
        return math.sqrt(total)

    def _check_places(self, planes: Planes, values: np.ndarray) -> None:
        if not rising(planes, self._top_k):
            raise ArtifactRejected("index", "places of a chunk that do not go up: expected each once, in order")
        if self._chunk < 1 << self._bits:
            last = numbers_of(planes, slice(self._top_k - 1, None, self._top_k)).max(initial=0)
            if last >= self._chunk:
                raise ArtifactRejected("index", f"place {last} of a chunk of {self._chunk} values")
        if self._basis is None:
            places = numbers_of(planes, slice(-self._top_k, None))
            behind = places >= self._count - (self._chunks - 1) * self._chunk
            if (behind & (values[-1] != 0)).any():
                raise ArtifactRejected("index", f"a place behind the last of {self._count} weights")

    def new_total(self) -> Tensor:
        return torch.zeros(self._chunks, self._chunk)

    def fold(self, total: Tensor, tensors: Tensors) -> None:
        values = tensors["values"].astype(np.float32) * tensors["scales"][:, None]
        found = numbers_of(self._planes(tensors["places"])).reshape(values.shape)
        places = found + self._chunk * np.arange(self._chunks)[:, None]  # int64
        total.view(-1).index_add_(0, torch.from_numpy(places.reshape(-1)), torch.from_numpy(values.reshape(-1)))

    def finish(self, total: Tensor, factor: float) -> Tensor:
        total.mul_(factor)
        if self._basis is None:
            return total.view(-1)[: self._count]
        tiles = total.view(-1, self._side, self._side)
        return (self._basis.T @ tiles @ self._basis).view(-1)[: self._count]

    def _coefficients(self, delta: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(delta, (0, self._chunks * self._chunk - self._count))
        if self._basis is None:
            return padded.view(self._chunks, self._chunk)
        basis = self._basis.to(delta.device)
        return (basis @ padded.view(-1, self._side, self._side) @ basis.T).view(self._chunks, self._chunk)

    def _planes(self, places: np.ndarray) -> Planes:
        return unpack_planes(places, self._chunks * self._top_k, self._bits)


class AggregateCodec:
    """What a window changes, as it is published: one multiplication and one subtraction a weight, each rounded once,
    so that whoever applies it ends with the same bits."""

    def __init__(self, num_weights: int, *, eight_bit: bool) -> None:
        self._count = num_weights
        self._blocks = -(-num_weights // _BLOCK)
        self._eight_bit = eight_bit
        self.shapes: Shapes = {"change": ("F32", (num_weights,))}
        if eight_bit:
            self.shapes = {"change": ("I8", (self._blocks, _BLOCK)), "scales": ("F32", (self._blocks,))}

    def encode(self, change: Tensor) -> Tensors:
        if not self._eight_bit:
            return {"change": change.numpy()}
        padded = torch.nn.functional.pad(change, (0, self._blocks * _BLOCK - self._count)).view(-1, _BLOCK)
        scales = padded.abs().amax(dim=1) / _LARGEST_INT8
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
        values = (padded / divisors[:, None]).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8)
        return {"change": values.to(torch.int8).numpy(), "scales": scales.numpy()}

    def apply(self, weights: Tensor, tensors: Tensors) -> None:
        """Take a change off the weights, in place."""
        change = tensors["change"]
        if self._eight_bit:
            change = (change.astype(np.float32) * tensors["scales"][:, None]).reshape(-1)[: self._count]
        np.subtract(weights.numpy(), change, out=weights.numpy())

    def check(self, tensors: Tensors) -> None:
        _finite_norm(tensors["scales" if self._eight_bit else "change"], "the aggregate")


def _cosines(side: int) -> Tensor:
    """The orthonormal basis of the cosine transform, a row a frequency."""
    place, frequency = np.arange(side) + 0.5, np.arange(side)[:, None]
    basis = np.cos(np.pi / side * place * frequency) * math.sqrt(2.0 / side)
    basis[0] /= math.sqrt(2.0)
    return torch.from_numpy(basis.astype(np.float32))


def _finite_norm(values: np.ndarray, what: str) -> float:
    """The norm in one pass and without a copy: blocks in fp32, their sum in float64."""
    whole = len(values) // _NORM_BLOCK * _NORM_BLOCK
    blocks = values[:whole].reshape(-1, _NORM_BLOCK)
    squares = np.einsum("ij,ij->i", blocks, blocks).astype(np.float64).sum()
    total = float(squares) + float(np.square(values[whole:], dtype=np.float64).sum())
    if not math.isfinite(total):
        raise ArtifactRejected("not finite", f"{what} hold numbers that are not finite, or whose squares are not")
    return math.sqrt(total)

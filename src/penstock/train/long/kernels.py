"""The arithmetic of attention from a chunk to all keys before it, forward and backward.

Here the model's own attention, with a mask, computed again in the backward pass so that nothing of the size of queries
times keys outlives it. For plain attention there are faster ways (`fast_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.train.long.dice import random_state, replayed
from penstock.train.long.documents import Documents

OwnAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A model's attention: query, key and value as ``(sequences, heads, length, dim)`` and a mask of who may see whom, to
``(sequences, length, heads, dim)``."""

_SCORES_BYTES = 32 << 20
"""Scores of queries and keys computed at a time, in fp32."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What the queries of a chunk may see."""

    documents: Documents
    start: int
    stop: int
    window: int | None = None
    """How many tokens back, itself included; None for all."""

    own_only: bool = False
    """Whether keys of earlier chunks are left out."""
    first_key: int = field(init=False)

    def __post_init__(self) -> None:
        first = self.start if self.own_only else self.documents.first_key(self.start, self.window)
        object.__setattr__(self, "first_key", first)

    def own(self) -> Reach:
        """The same without keys of earlier chunks."""
        return replace(self, own_only=True)

    def mask(self, part: slice | None = None) -> Tensor:
        """True where one of some queries, or of all, may see a key; of keys up to the last of those queries."""
        start, stop = (self.start, self.stop) if part is None else (self.start + part.start, self.start + part.stop)
        return self.documents.mask(start, stop, self.first_key, self.window)


class Kernel(Protocol):
    """Attention of queries to keys from the reach's first one on, all ``(sequences, length, heads, dim)``."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What is attended to, and what the backward pass wants kept of this."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, kept: tuple[Tensor, ...], reach: Reach
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        ...


@dataclass(frozen=True, slots=True)
class OwnKernel:
    """The model's own attention, with a mask; computed a second time in the backward pass."""

    attend: OwnAttention
    dropout: bool = False
    """Whether it draws random numbers: the backward pass then draws the same ones."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept = random_state(query.device) if self.dropout else ()
        return torch.cat([self._attended(query, keys, values, reach, part) for part in _parts(query, reach)], 1), kept

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, kept: tuple[Tensor, ...], reach: Reach
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = [part.detach().requires_grad_() for part in (query, keys, values)]
        with replayed(kept, query.device) if kept else nullcontext():
            for part in _parts(query, reach):
                with torch.enable_grad():
                    attended = self._attended(inputs[0], inputs[1], inputs[2], reach, part)
                # Not grad(): parameters that attention itself uses get theirs too.
                torch.autograd.backward(attended, grad[:, part].to(attended.dtype))
        grads = [part.grad if part.grad is not None else torch.zeros_like(part) for part in inputs]
        return grads[0], grads[1], grads[2]

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach, part: slice) -> Tensor:
        mask = reach.mask(part)
        seen = slice(0, mask.shape[-1])
        return self.attend(
            query[:, part].transpose(1, 2), keys[:, seen].transpose(1, 2), values[:, seen].transpose(1, 2), mask
        )


def _parts(query: Tensor, reach: Reach) -> list[slice]:
    """The queries, as many at a time as there may be scores of."""
    sequences, length, heads, _ = query.shape
    most = max(1, _SCORES_BYTES // (4 * sequences * heads * (reach.stop - reach.first_key)))
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]

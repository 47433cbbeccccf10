"""Attention to a chunk's own tokens and to all before it, with the gradients of the whole sequence.

Forward, a chunk's keys and values join the memory and its queries see all of it. Backward, chunks come from the last to
the first: the gradients that a chunk's attention has for earlier keys and values wait in the memory, and each chunk
hands its own projections what all later chunks have left there. What a sequence as a whole would compute, in another
order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.train.long.documents import Documents
from penstock.train.long.fast_kernels import fast_kernel
from penstock.train.long.kernels import Kernel, OwnAttention, OwnKernel, Reach
from penstock.train.long.memory import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAttention:
    """Attention of one chunk: every layer calls it with its own queries, keys and values."""

    memory: Memory
    documents: Documents
    start: int
    stop: int

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: OwnAttention,
        *,
        scaling: float | None = None,
        window: int | None = None,
        plain: bool = True,
        dropout: bool = False,
    ) -> Tensor:
        """What the chunk's tokens attend to, ``(sequences, length, heads, dim)``.

        Args:
            layer: Which one, by number.
            query: And key and value: of the chunk, ``(sequences, heads, length, dim)``.
            key: See `query`.
            value: See `query`.
            own: The model's own attention.
            scaling: Of the products of queries and keys; None for one over the root of the dimension.
            window: How many tokens back a query sees, itself included.
            plain: Whether the model's attention is no more than softmax of scaled products.
            dropout: Whether it leaves some out at random.
        """
        if torch.is_autocast_enabled(query.device.type):
            wanted = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
        reach = Reach(self.documents, self.start, self.stop, window)
        fast = fast_kernel(query, key, value, scaling, reach) if plain and not dropout else None
        kernel: Kernel = fast or OwnKernel(own, dropout)
        laid = (part.transpose(1, 2) for part in (query, key, value))
        return _Attend.apply(*laid, layer, self.memory, kernel, reach)  # pyright: ignore[reportReturnType]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        memory: Memory,
        kernel: Kernel,
        reach: Reach,
    ) -> Tensor:
        memory.store(layer, key, value, reach)
        keys, values = memory.recall(layer, reach)
        with torch.autocast(query.device.type, enabled=False):  # in one type already
            attended, kept = kernel.forward(query, keys, values, reach)
        ctx.save_for_backward(query, *kept)
        ctx.told = layer, memory, kernel, reach
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, *kept = ctx.saved_tensors
        layer, memory, kernel, reach = ctx.told
        keys, values = memory.recall_backward(layer, reach)
        with torch.autocast(query.device.type, enabled=False):
            query_grads, key_grads, value_grads = kernel.backward(grads[0], query, keys, values, tuple(kept), reach)
        own = memory.settle(layer, reach, key_grads, value_grads)
        return query_grads, *own, None, None, None, None

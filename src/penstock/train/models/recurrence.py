"""A memory of fixed size that reads a sequence in parallel: the gated delta rule, in blocks.

Each head holds a matrix S that maps keys to values. A token with key k, value v, query q, share kept a and strength w
forgets a little, looks up what the memory says of its key, and mends it by the difference:

    S  <-  a S
    S  <-  S + w k (v - S^T k)^T
    out =  S^T q

With w = 0 and a = 1 a token leaves no trace. A document begins with S = 0.

Token by token this is a loop. Within a block of tokens the differences are a triangular system, solved for all blocks
at once; from block to block the memory then goes by one multiply-and-add. Where blocks begin is a matter of speed: the
result is the same recurrence for any cut, so a sequence read in pieces, the memory handed on, is the sequence read
whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

_BLOCK = 64


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_keep: Tensor,
    strength: Tensor,
    documents: Tensor,
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """Read a piece of each sequence; computed in the type of `memory`, whatever autocast says.

    Args:
        query: ``(sequences, length, heads, key size)``, as is
        key: of length 1 each, or the memory may blow up;
        value: ``(sequences, length, heads, value size)``.
        log_keep: ``(sequences, length, heads)``: logarithm of the share kept, 0 or less.
        strength: ``(sequences, length, heads)``: 0 to 1.
        documents: ``(sequences, length)``: how many documents have begun in this piece, up to each token; 0 as long as
            the one goes on that the memory is of.
        memory: ``(sequences, heads, key size, value size)``: what was read before.

    Returns:
        What was read out, shaped as `value`, and the memory behind the last token.
    """
    length = query.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (_in_blocks(part, memory.dtype) for part in (query, key, value))
        strength = _in_blocks(strength[..., None], memory.dtype)
        places = _document_blocks(documents)
        seen = (places[..., :, None] == places[..., None, :]).tril()[:, None]
        # A sum from each document's own beginning: one over all of the block would round by what others hold.
        kept = (seen.to(memory.dtype) @ _in_blocks(log_keep[..., None], memory.dtype)).squeeze(-1)
        decay = (kept[..., :, None] - kept[..., None, :]).masked_fill(~seen, -torch.inf).exp()
        entering = torch.cat([torch.zeros_like(places[:, :1, -1]), places[:, :-1, -1]], dim=1)
        of_memory = (kept.exp() * (places == entering[..., None])[:, None])[..., None]

        keys = key.transpose(-1, -2)
        known = (strength * (key @ keys) * decay).tril(-1)
        wanted = torch.cat([strength * value, strength * of_memory * key], dim=-1)
        solved = torch.linalg.solve_triangular(known, wanted, upper=False, unitriangular=True)
        written, erased = solved.split([value.shape[-1], key.shape[-1]], dim=-1)

        ends = keys * decay[..., -1:, :]
        onward = of_memory[..., -1:, :] * torch.eye(key.shape[-1], dtype=memory.dtype, device=memory.device)
        onward = onward - ends @ erased
        added = ends @ written
        at_start, memory = _from_block_to_block(onward, added, memory)

        changes = written - erased @ at_start
        out = (query @ keys * decay) @ changes + (query * of_memory) @ at_start
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), memory


def _from_block_to_block(onward: Tensor, added: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The memory each block begins with, ``(sequences, heads, blocks, ...)``, and the one behind the last."""
    by_block = [part.flatten(0, 1).transpose(0, 1).contiguous() for part in (onward, added)]
    starts, last = _Chain.apply(*by_block, memory.flatten(0, 1))  # pyright: ignore
    return starts.transpose(0, 1).unflatten(0, memory.shape[:2]), last.unflatten(0, memory.shape[:2])


class _Chain(torch.autograd.Function):
    """``memory <- onward[i] @ memory + added[i]``, block by block: one product a block each way, which is all that
    cannot be done for all blocks at once."""

    @staticmethod
    def forward(ctx: Any, onward: Tensor, added: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memories = added.new_empty(len(added) + 1, *memory.shape)
        memories[0] = memory
        for block in range(len(added)):
            torch.baddbmm(added[block], onward[block], memories[block], out=memories[block + 1])
        starts, last = memories[:-1], memories[-1].clone()
        ctx.save_for_backward(onward, starts)
        return starts, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        onward, starts = ctx.saved_tensors
        of_starts, of_memory = grads
        back = onward.transpose(2, 3)
        along = starts.new_empty(len(starts) + 1, *of_memory.shape)
        along[-1] = of_memory
        for block in reversed(range(len(starts))):
            torch.baddbmm(of_starts[block], back[block], along[block + 1], out=along[block])
        return along[1:] @ starts.transpose(2, 3), along[1:], along[0]


def _in_blocks(part: Tensor, dtype: torch.dtype) -> Tensor:
    """``(sequences, length, heads, size)`` as ``(sequences, heads, blocks, _BLOCK, size)``, filled up with 0.

    What is filled up has a logarithm of 0 and a strength of 0: it leaves no trace.
    """
    filled = nnf.pad(part.to(dtype), (0, 0, 0, 0, 0, -part.shape[1] % _BLOCK))
    return filled.transpose(1, 2).unflatten(2, (-1, _BLOCK))


def _document_blocks(documents: Tensor) -> Tensor:
    """``(sequences, blocks, _BLOCK)``, filled up with the last document."""
    missing = -documents.shape[1] % _BLOCK
    return torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, _BLOCK))

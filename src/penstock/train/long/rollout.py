"""A sequence of any length through a model with a carry, in the memory of a chunk of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.train.long.chunkable import chunkable
from penstock.train.long.exact import ExactChunks
from penstock.train.long.offloading import OffloadSaved
from penstock.train.long.tokens import LongTokens, long_tokens
from penstock.train.models import Learner
from penstock.train.models.carrying import Carry, CarryModel, ponder_loss
from penstock.train.models.huggingface import CausalLM
from penstock.train.trainer import Computing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What came of reading a batch of sequences to their end."""

    loss_sum: Tensor
    """Over all places that have a label, in float64; while the model trains, with what pondering cost."""
    ponder_loss_sum: Tensor
    """The part of it that is the price of pondering."""
    num_tokens: int
    """Places that have a label."""
    carry: Carry
    """What the model remembers behind the last token, of no graph: to read on, where sequences go on elsewhere."""
    segments: tuple[int, ...]
    """How often each chunk was pondered."""

    @property
    def loss(self) -> Tensor:
        """The mean a token."""
        return self.loss_sum / max(1, self.num_tokens)


def chunked_segment_rollout(
    model: nn.Module,
    batch: Mapping[str, Any] | LongTokens,
    max_segments: int = 5,
    chunk_size: int = 2048,
    *,
    bptt_chunks: int | Literal["all"] = 1,
    cpu_offload: bool = False,
    weight: float | None = None,
    carry: Carry | None = None,
    computing: Computing = nullcontext,
) -> Rollout:
    """Read sequences chunk by chunk, the carry handed on, and add the gradients of their loss to ``.grad``.

    Remembering is exact: the loss is that of the whole sequence read at once, for any `chunk_size`, because a carry is
    never reset on the way; halting ends thinking about a token, not what is known. Going back is as far as asked: after
    every `bptt_chunks` chunks their graph is used and freed, and the carry goes on as a number. A gradient therefore
    does not reach further back than `bptt_chunks` chunks; with ``"all"`` it is the exact gradient of the whole.

    What is kept for going back is that of `bptt_chunks` chunks, however long the sequences are.

    A model of `transformers` has no carry: its chunks leave keys and values for later ones, and gradients are always
    those of the whole (`exact.py`). `max_segments` and `bptt_chunks` mean nothing to it. One that cannot be cut is
    refused.

    Args:
        model: With a carry (`CarryModel`), such as ``--model act``, or a causal language model of `transformers`. Its
            parameters say on which device it computes.
        batch: `input_ids` and perhaps `labels`, `position_ids`, `document_ids`, `attention_mask`, as tensors or arrays
            (`long_tokens` says what is made of them). They may stay on the host: a chunk at a time goes to the device.
        max_segments: The most ponder steps (segments) a token may take in its chunk. The model's own bound
            (`halt_max_steps`) holds too; tokens that halt earlier take fewer.
        chunk_size: Tokens of each sequence read at a time. A matter of memory and speed, not of the result.
        bptt_chunks: Chunks that gradients go back through.
        cpu_offload: Keep the carry between chunks, and what is saved for going back, in the host's memory.
        weight: What the summed loss is divided by before going back; the number of places with a label where not given.
            Where sequences are part of a larger batch, that of the larger batch.
        carry: Read on with this one, instead of from nothing.
        computing: Entered around each forward, never around going back: autocast, such as ``trainer.computing``.

    Under ``torch.no_grad()`` only the loss is computed.
    """
    device = _checked(model, max_segments, chunk_size, bptt_chunks)
    tokens = batch if isinstance(batch, LongTokens) else long_tokens(batch)
    counts = tokens.label_counts(chunk_size)
    num_tokens = sum(counts)
    divisor = float(max(1, num_tokens)) if weight is None else float(weight)
    if not divisor > 0:
        raise ConfigError(f"weight={weight} cannot divide a loss: expected a number above 0")
    if not isinstance(model, CarryModel):
        learning = _exact_chunks(model, len(tokens), chunk_size, cpu_offload=cpu_offload)
        if carry is not None:
            raise ConfigError(f"{type(model).__name__} has no carry to read on with: leave carry away")
        loss_sum = _learned_exactly(learning, tokens, divisor, device, computing)
        nothing = torch.zeros_like(loss_sum)
        return Rollout(
            loss_sum=loss_sum, ponder_loss_sum=nothing, num_tokens=num_tokens, carry={}, segments=(1,) * len(counts)
        )
    if carry is None:
        carry = model.initial_carry(len(tokens.input_ids), device)
    total, ponder_total = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    waiting: list[Tensor] = []
    segments: list[int] = []
    for number, start in enumerate(range(0, len(tokens), chunk_size)):
        piece = tokens.piece(start, start + chunk_size, device)
        with computing(), OffloadSaved(model.parameters()) if cpu_offload else nullcontext():
            output = model.forward_chunk(
                piece.input_ids,
                piece.position_ids,
                piece.document_ids,
                _moved(carry, device),
                max_segments=max_segments,
            )
            loss = model.loss_of(output.hidden, piece.labels)
            ponder = ponder_loss(output, piece.labels) if model.training else torch.zeros_like(loss)
        total, ponder_total = total + (loss + ponder).detach(), ponder_total + ponder.detach()
        segments.append(output.segments)
        waiting.append(loss + ponder)
        carry = output.carry
        del output, loss, ponder  # or they would be alive beside those of the chunk that follows
        is_last = number == len(counts) - 1
        if is_last or (bptt_chunks != "all" and (number + 1) % bptt_chunks == 0):
            _go_back(waiting, counts[number + 1 - len(waiting) : number + 1], divisor)
            waiting = []
            carry = {name: tensor.detach() for name, tensor in carry.items()}
        if cpu_offload:
            carry = _moved(carry, torch.device("cpu"))
    return Rollout(
        loss_sum=total, ponder_loss_sum=ponder_total, num_tokens=num_tokens, carry=carry, segments=tuple(segments)
    )


def _go_back(losses: list[Tensor], counts: list[int], divisor: float) -> None:
    """Add the gradients of some chunks' losses; where there is nothing to learn there is nothing to do."""
    if sum(counts) and losses[-1].requires_grad:
        (torch.stack(losses).sum() / divisor).backward()


def _moved(carry: Carry, device: torch.device) -> Carry:
    return {name: tensor.to(device) for name, tensor in carry.items()}


def _exact_chunks(model: nn.Module, length: int, chunk_size: int, *, cpu_offload: bool) -> ExactChunks:
    """For a model without a carry: chunks with the gradients of the whole."""
    transformers = sys.modules.get("transformers")  # where it was never imported there is no model of it
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        model = CausalLM.around(model)
    if not isinstance(model, Learner):
        raise ConfigError(
            f"{type(model).__name__} has no carry to hand from chunk to chunk, and is no model of transformers: "
            "expected initial_carry, forward_chunk and loss_of, as of --model act"
        )
    return ExactChunks(chunkable(model, length), chunk_size, cpu_offload=cpu_offload)


def _learned_exactly(
    learning: ExactChunks, tokens: LongTokens, divisor: float, device: torch.device, computing: Computing
) -> Tensor:
    moved = tokens.piece(0, len(tokens), device)
    documents = tokens.document_ids.cpu().numpy()
    if torch.is_grad_enabled():
        return learning.learn_tokens(moved, documents, divisor, computing) * divisor
    with computing():
        return learning.loss_of_tokens(moved, documents)


def _checked(model: nn.Module, max_segments: int, chunk_size: int, bptt_chunks: int | str) -> torch.device:
    """Refuse what cannot work; returns where the model is."""
    for name, value, least in (("max_segments", max_segments, 1), ("chunk_size", chunk_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r} cannot work: expected a number of {least} or more")
    if bptt_chunks != "all" and (isinstance(bptt_chunks, bool) or not isinstance(bptt_chunks, int) or bptt_chunks < 1):
        raise ConfigError(f"bptt_chunks={bptt_chunks!r} cannot work: expected a number of 1 or more, or 'all'")
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

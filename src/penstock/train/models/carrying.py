"""What a model with a carry is: one that reads a sequence piece by piece and hands on what it remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.feed import IGNORED_LABEL

Carry = dict[str, Tensor]
"""What a model remembers of each sequence: named tensors whose first dimension is the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOutput:
    """What a model made of a piece of each sequence."""

    hidden: Tensor
    """``(sequences, length, size)``: what `loss_of` takes."""
    carry: Carry
    """For the piece that follows."""
    ponder_cost: Tensor | None = None
    """``(sequences, length)``: what thinking costs at each token, to be added to its loss; None where it is free."""
    segments: int = 1
    """How often the piece was pondered: at the token that took longest."""


@runtime_checkable
class CarryModel(Protocol):
    """A model that `chunked_segment_rollout` can train. It promises:

    - Order: a token's output depends on itself and on earlier tokens of its document, in this piece or before it.
    - The same for any cut: pieces read in order, the carry handed on, give what the whole sequence gives, up to
      rounding. Documents are told by number, so the model must not take the beginning of a piece for one of a document.
    - Bounded: the carry does not grow with what was read.
    """

    def initial_carry(self, sequences: int, device: torch.device) -> Carry:
        """The carry of sequences of which nothing was read."""
        ...

    def forward_chunk(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        carry: Carry,
        *,
        max_segments: int | None = None,
    ) -> ChunkOutput:
        """Read a piece of each sequence.

        Args:
            input_ids: ``(sequences, length)``.
            position_ids: Of each token in its document; they go on from piece to piece.
            document_ids: Tokens in a run of one number are of one document; negative for padding.
            carry: What was remembered before; of the piece before, or `initial_carry`.
            max_segments: Ponder no more often; None leaves it to the model.
        """
        ...

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss summed over all places that have a label, in float64."""
        ...


def ponder_loss(output: ChunkOutput, labels: Tensor) -> Tensor:
    """What thinking cost at all places that have a label, in float64."""
    if output.ponder_cost is None:
        return torch.zeros((), dtype=torch.float64, device=labels.device)
    return (output.ponder_cost.double() * (labels != IGNORED_LABEL)).sum()

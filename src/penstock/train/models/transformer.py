"""A small decoder-only transformer: rotary positions, RMS norms, gated feed-forward, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from penstock.feed import IGNORED_LABEL
from penstock.train.device_batch import DeviceBatch
from penstock.train.models.base import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a transformer is."""

    dim: int
    layers: int
    heads: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value, ``(sequences, heads, length, dim)``, to what is attended to, ``(sequences, length, heads,
dim)``."""

FEED_FACTOR = 3
"""How much wider the feed-forward is than the stream."""

SHAPES = {
    "tiny": Shape(dim=64, layers=2, heads=2),
    "small": Shape(dim=384, layers=6, heads=6),
}


class Transformer(Learner):
    """Predicts the next token; attends backward and never into another document."""

    def __init__(self, shape: Shape, *, vocab_size: int, across_documents: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.across_documents = across_documents
        self.embed = nn.Embedding(vocab_size, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Logits ``(sequences, length, vocabulary)``."""
        mask = None
        if self.across_documents:  # then positions are those in the sequence
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        else:
            mask = (document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]
        rotation = rotary(position_ids, self.shape.head_dim)
        hidden = self.embed(input_ids)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = nnf.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
            return mixed.transpose(1, 2)

        for layer in self.layers:
            hidden = layer(hidden, attend, rotation)
        return self.norm(hidden) @ self.embed.weight.T

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        logits = self(batch.input_ids[rows], batch.position_ids[rows], batch.document_ids[rows])
        return summed_cross_entropy(logits, batch.labels[rows])


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Over all places that have a label, each in fp32, whatever the logits are in.

    Summed in float64: the sum of any split of a batch is the same to 1e-8.
    """
    flat = logits.flatten(0, 1).float()
    losses = nnf.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return losses.double().sum()


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.feed_norm = nn.RMSNorm(shape.dim)
        self.gate = nn.Linear(shape.dim, FEED_FACTOR * shape.dim, bias=False)
        self.up = nn.Linear(shape.dim, FEED_FACTOR * shape.dim, bias=False)
        self.down = nn.Linear(FEED_FACTOR * shape.dim, shape.dim, bias=False)

    def forward(self, hidden: Tensor, attend: Attend, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = (rotate(part, rotation).to(value.dtype).transpose(1, 2) for part in (query, key))
        hidden = hidden + self.out(attend(query, key, value.transpose(1, 2)).flatten(2))
        normed = self.feed_norm(hidden)
        return hidden + self.down(nnf.silu(self.gate(normed)) * self.up(normed))


def rotary(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, ``(sequences, length, 1, head_dim / 2)``."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=position_ids.device) / head_dim)
    angles = position_ids[:, :, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(part: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = part.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

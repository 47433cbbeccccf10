"""The layers of the recurrent model, and the carry they read and write while a piece of a sequence passes."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from penstock.train.models.carrying import Carry
from penstock.train.models.recurrence import delta_rule

FEED_FACTOR = 3
"""How much wider the feed-forward is than the stream."""

_SLOWEST, _FASTEST = -9.0, -4.0
"""Heads begin by forgetting 1 part in 8 000 to 1 in 55 of what they know, a token; they learn how much, and of what."""

_SMALL = 1e-2
"""Squares below this count as next to nothing where states are scaled to one size. A document's first token has no
neighbour, so its key can be 0; scaled by a smaller number, its gradient would be larger than all others together."""


class Reading:
    """A piece of each sequence while the model goes over it: which tokens take part, and a memory a use of a layer.

    The same layer is used several times and has a memory for each use. Uses come in the same order every time.
    """

    def __init__(self, documents: Tensor, carry: Carry) -> None:
        """Begin to read.

        Args:
            documents: ``(sequences, length)``, negative for padding, which never takes part.
            carry: What was remembered before.
        """
        self._last = documents[:, -1]
        self._follows = documents == torch.cat([carry["documents"][:, None], documents[:, :-1]], dim=1)
        self.documents = (~self._follows).cumsum(1)
        """How many documents have begun in this piece, up to each token."""
        self.taking_part = documents >= 0
        """Tokens that are still pondered. Others leave no trace in any memory."""
        self._memories = list(zip(carry["memories"].unbind(1), carry["neighbours"].unbind(1), strict=True))
        self._kept: list[tuple[Tensor, Tensor]] = []

    def previous(self, states: Tensor) -> Tensor:
        """The state of the token before each, of the same use; 0 where that is of another document or takes no part."""
        own = states * self.taking_part[..., None]
        last = self._memories[len(self._kept)][1].to(own.dtype)
        return torch.cat([last[:, None], own[:, :-1]], dim=1) * self._follows[..., None]

    def memory(self) -> Tensor:
        """The memory of the use that is next."""
        return self._memories[len(self._kept)][0]

    def keep(self, memory: Tensor, states: Tensor) -> None:
        """End a use, with its memory behind the last token."""
        last = states[:, -1] * self.taking_part[:, -1:]
        self._kept.append((memory, last.to(memory.dtype)))

    def pass_by(self) -> None:
        """End all uses that are left as they would end with no token taking part: memories stay, within a document."""
        goes_on = self.documents[:, -1] == 0
        for memory, neighbour in self._memories[len(self._kept) :]:
            self._kept.append((memory * goes_on[:, None, None, None], torch.zeros_like(neighbour)))

    def carry(self) -> Carry:
        """What is handed on."""
        memories, neighbours = zip(*self._kept, strict=True)
        return {
            "memories": torch.stack(memories, dim=1),
            "neighbours": torch.stack(neighbours, dim=1),
            "documents": self._last,
        }


class RecurrentLayer(nn.Module):
    """A memory and a feed-forward, each behind a norm and added to the stream.

    Key, value and query are each made of a token and a learned share of the one before it: a memory can then hold "what
    came after this", which is what recall asks for. That is also where it begins: a key is of the token before, query
    and value are of the token itself, and query and key have the same weights.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.memory_norm = nn.RMSNorm(dim)
        self.shares = nn.Parameter(torch.zeros(3 * dim))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.gates = nn.Linear(dim, 2 * heads)
        self.open = nn.Linear(dim, dim, bias=False)
        self.out_norm = nn.RMSNorm(dim // heads, eps=_SMALL)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, FEED_FACTOR * dim, bias=False)
        self.up = nn.Linear(dim, FEED_FACTOR * dim, bias=False)
        self.down = nn.Linear(FEED_FACTOR * dim, dim, bias=False)
        with torch.no_grad():
            self.gates.bias[:heads] = torch.linspace(_SLOWEST, _FASTEST, heads)
            self.gates.bias[heads:] = 0.0
            self.query.weight.copy_(self.key.weight)
            self.shares[dim : 2 * dim] = 1.0

    def forward(self, hidden: Tensor, reading: Reading) -> Tensor:
        hidden = hidden + self._recall(self.memory_norm(hidden), reading)
        normed = self.feed_norm(hidden)
        return hidden + self.down(nnf.silu(self.gate(normed)) * self.up(normed))

    def _recall(self, states: Tensor, reading: Reading) -> Tensor:
        towards = reading.previous(states) - states
        query, key, value = (
            self._by_head(project(states + towards * share))
            for project, share in zip((self.query, self.key, self.value), self.shares.chunk(3), strict=True)
        )
        memory = reading.memory()
        forget, write = self.gates(states).to(memory.dtype).chunk(2, dim=-1)
        taking_part = reading.taking_part[..., None]
        found, memory = delta_rule(
            _of_length_1(query, memory.dtype),
            _of_length_1(key, memory.dtype),
            value,
            log_keep=-nnf.softplus(forget) * taking_part,
            strength=write.sigmoid() * taking_part,
            documents=reading.documents,
            memory=memory,
        )
        reading.keep(memory, states)
        return self.out(self.out_norm(found).flatten(2) * nnf.silu(self.open(states)))

    def _by_head(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.heads, -1))


class Stack(nn.Module):
    """Layers one upon the other, with a norm at the end: what goes round through it many times keeps its size."""

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecurrentLayer(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)

    def forward(self, hidden: Tensor, reading: Reading) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, reading)
        return self.norm(hidden)


def _of_length_1(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly so; less for small ones, and 0 for 0."""
    states = nnf.silu(states.to(dtype))
    return states * (states.square().sum(-1, keepdim=True) + _SMALL).rsqrt()

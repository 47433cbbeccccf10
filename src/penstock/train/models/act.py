"""The recurrent model, `act`: a fast and a slow stack that ponder each token as long as it needs, and a carry.

    token ──► x ─┬──► fast ──► fast ──► slow ──► halt? ── no ──► fast ──► fast ──► slow ──► halt? ...
                 └─────┴────────┴────────┴─────────────────────────┘                           │
                                             logits of the states, weighted by when it halts ◄─┘

**Two speeds.** The fast stack goes round `cycles` times, then the slow one takes in what it found: one ponder step. The
weights are the same in every step; the slow state says what the fast one works on.

**The carry.** A layer knows earlier tokens only by its memory, a matrix a head (`recurrence.py`), and by the token just
before. Each use of a layer (step, cycle, layer) has a memory of its own, read and written by tokens in order: that of
step 2 holds what earlier tokens were in step 2. All of them together are the carry. Its size is fixed, a token sees
none but earlier ones, and where a sequence is cut into pieces makes no difference. There is no embedding of positions:
order is in the recurrence, so nothing begins again at a cut, and no length is too long. Documents begin with an empty
memory, unless they may see each other; padding is a document that leaves no trace.

**Halting** is adaptive computation time. Behind each step a head says which share of what is left of a token halts
here. A token is pondered until no more than `_ENOUGH_LEFT` is left, or `halt_max_steps` times; its last step gets the
rest. Its output is the sum of its slow states, weighted by these shares: differentiable, and without chance, so that a
resumed run goes on bit by bit. `PONDER_COST` a step, weighted in the same way, is what thinking on must be worth.

A token that has halted leaves no trace in the memories of later steps. So where all tokens of a piece have halted, the
steps that are left need not be computed, and leaving them out changes nothing: neither outputs nor gradients nor carry.
Halting ends thinking about a token. It never touches what is remembered.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.train.device_batch import DeviceBatch
from penstock.train.models.act_layers import Reading, Stack
from penstock.train.models.base import Learner
from penstock.train.models.carrying import Carry, ChunkOutput, ponder_loss
from penstock.train.models.vocabulary_loss import vocabulary_loss

_ENOUGH_LEFT = 0.05
"""A token halts once it is this sure."""
PONDER_COST = 0.01
"""In nats, a token and ponder step behind the first."""
_NOTHING_READ = -2
"""Of no document and no padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActShape:
    """How large a recurrent model is."""

    dim: int = 256
    heads: int = 4
    fast_layers: int = 2
    slow_layers: int = 2
    cycles: int = 2
    """How often the fast stack goes round before the slow one moves."""

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1 or self.dim % self.heads:
            raise ConfigError(f"{self} cannot work: expected numbers of 1 or more, and dim a multiple of heads")

    @property
    def uses(self) -> int:
        """How often layers are used in a ponder step."""
        return self.cycles * self.fast_layers + self.slow_layers


class RecurrentModel(Learner):
    """Predicts the next token; remembers earlier ones of its document in a carry. A `CarryModel`."""

    def __init__(
        self, shape: ActShape, *, vocab_size: int, halt_max_steps: int = 1, across_documents: bool = False
    ) -> None:
        super().__init__()
        if halt_max_steps < 1:
            raise ConfigError(f"halt_max_steps={halt_max_steps} computes nothing: expected 1 or more")
        self.shape = shape
        self.halt_max_steps = halt_max_steps
        self._across_documents = across_documents
        self.embed = nn.Embedding(vocab_size, shape.dim)
        self.embed_norm = nn.RMSNorm(shape.dim)
        self.fast = Stack(shape.dim, shape.heads, shape.fast_layers)
        self.slow = Stack(shape.dim, shape.heads, shape.slow_layers)
        self.norm = nn.RMSNorm(shape.dim)
        self.halt = nn.Linear(shape.dim, 1) if halt_max_steps > 1 else None
        """None where there is nothing to decide."""
        nn.init.normal_(self.embed.weight, std=0.02)

    def initial_carry(self, sequences: int, device: torch.device) -> Carry:
        size = self.shape.dim // self.shape.heads
        uses = self.halt_max_steps * self.shape.uses
        dtype = torch.promote_types(self.embed.weight.dtype, torch.float32)
        return {
            "memories": torch.zeros(sequences, uses, self.shape.heads, size, size, dtype=dtype, device=device),
            "neighbours": torch.zeros(sequences, uses, self.shape.dim, dtype=dtype, device=device),
            "documents": torch.full((sequences,), _NOTHING_READ, device=device),
        }

    def forward_chunk(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        carry: Carry,
        *,
        max_segments: int | None = None,
    ) -> ChunkOutput:
        documents = torch.where(document_ids < 0, -1, 0) if self._across_documents else document_ids
        reading = Reading(documents, carry)
        most = min(self.halt_max_steps, max_segments or self.halt_max_steps)
        token = self.embed_norm(self.embed(input_ids))
        slow, fast = token, torch.zeros_like(token)
        left = torch.ones_like(token[..., 0], dtype=carry["memories"].dtype)
        output, cost = torch.zeros_like(left[..., None]), torch.zeros_like(left)
        steps = 0
        while steps < most:
            for _ in range(self.shape.cycles):
                fast = self.fast(fast + slow + token, reading)
            slow = self.slow(slow + fast, reading)
            share, left, still = self._halt(slow, left, last=steps + 1 == most)
            share = share * reading.taking_part
            output = output + share[..., None] * slow
            cost = cost + share * (PONDER_COST * steps)
            steps += 1
            reading.taking_part = reading.taking_part & still
            if steps < most and not reading.taking_part.any():
                break
        reading.pass_by()
        return ChunkOutput(hidden=self.norm(output), carry=reading.carry(), ponder_cost=cost, segments=steps)

    def _halt(self, slow: Tensor, left: Tensor, *, last: bool) -> tuple[Tensor, Tensor, Tensor]:
        """How much of each token's output is of this step, what is left for later ones, and which tokens go on."""
        if last or self.halt is None:
            return left, torch.zeros_like(left), torch.zeros_like(left, dtype=torch.bool)
        halts = self.halt(slow).squeeze(-1).to(left.dtype).sigmoid()
        rest = left - left * halts
        goes_on = rest.detach() > _ENOUGH_LEFT
        return torch.where(goes_on, left * halts, left), rest, goes_on

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_loss(hidden, self.embed.weight, labels)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Logits ``(sequences, length, vocabulary)`` of whole sequences."""
        return self._read(input_ids, position_ids, document_ids).hidden @ self.embed.weight.T

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        """While it is trained, with what pondering costs."""
        labels = batch.labels[rows]
        found = self._read(batch.input_ids[rows], batch.position_ids[rows], batch.document_ids[rows])
        loss = self.loss_of(found.hidden, labels)
        return loss + ponder_loss(found, labels) if self.training else loss

    def _read(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> ChunkOutput:
        carry = self.initial_carry(len(input_ids), input_ids.device)
        return self.forward_chunk(input_ids, position_ids, document_ids, carry)

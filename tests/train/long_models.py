"""Models with a carry, small enough to be compared bit by bit, and batches of long sequences for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from penstock.feed import IGNORED_LABEL
from penstock.train.models.act import ActShape, RecurrentModel
from penstock.train.models.carrying import Carry, ChunkOutput

VOCABULARY = 30
CPU = torch.device("cpu")
SMALL = ActShape(dim=16, heads=2, fast_layers=1, slow_layers=1, cycles=2)


def recurrent(
    *,
    seed: int = 0,
    halt_max_steps: int = 1,
    dtype: torch.dtype = torch.float64,
    across_documents: bool = False,
    shape: ActShape = SMALL,
) -> RecurrentModel:
    """In float64, so that what is equal in mathematics is equal to many digits; its halting head has opinions."""
    torch.manual_seed(seed)
    model = RecurrentModel(
        shape, vocab_size=VOCABULARY, halt_max_steps=halt_max_steps, across_documents=across_documents
    ).to(dtype)
    if model.halt is not None:
        nn.init.normal_(model.halt.weight, std=2.0)
    return model


class GruModel(nn.Module):
    """Another model with a carry: one hidden state, token by token. Takes positions, and remembers which it got."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.positions: list[Tensor] = []

    def initial_carry(self, sequences: int, device: torch.device) -> Carry:
        state = torch.zeros(sequences, 8, dtype=self.head.weight.dtype, device=device)
        return {"state": state, "document": torch.full((sequences,), -2, device=device)}

    def forward_chunk(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        carry: Carry,
        *,
        max_segments: int | None = None,
    ) -> ChunkOutput:
        self.positions.append(position_ids)
        state, document = carry["state"], carry["document"]
        outputs: list[Tensor] = []
        for ids, documents in zip(input_ids.unbind(1), document_ids.unbind(1), strict=True):
            state = self.cell(self.embed(ids), state * (documents == document)[:, None])
            document = documents
            outputs.append(state)
        return ChunkOutput(hidden=torch.stack(outputs, 1), carry={"state": state, "document": document})

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden).flatten(0, 1)
        return nnf.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum").double()


@dataclass(frozen=True, slots=True)
class Case:
    """Random documents of random lengths packed into sequences, with padding behind or before them."""

    seed: int
    sequences: int
    length: int
    documents: int
    padding: int
    left: bool

    def batch(self) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(self.seed)
        shape = self.sequences, self.length
        document_ids = torch.randint(self.documents, shape, generator=chance).sort(1).values
        mask = torch.ones(shape, dtype=torch.int64)
        if self.padding:
            mask[:, slice(0, self.padding) if self.left else slice(-self.padding, None)] = 0
        return {
            "input_ids": torch.randint(VOCABULARY, shape, generator=chance),
            "document_ids": document_ids,
            "attention_mask": mask,
        }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of a model, taken from it."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found

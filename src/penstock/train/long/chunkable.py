"""What learning in chunks asks of a model, and the built-in transformer as one that can."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as nnf
from torch import Tensor

from penstock.errors import ConfigError
from penstock.train.long.attention import ChunkAttention
from penstock.train.models import Learner, Transformer
from penstock.train.models.transformer import rotary


class Chunkable(Protocol):
    """A model whose tokens meet in attention and nowhere else."""

    @property
    def vocab_size(self) -> int:
        """How many logits a token has."""
        ...

    @property
    def depth(self) -> int:
        """How many layers."""
        ...

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether documents that share a sequence do not see each other."""
        ...

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: ChunkAttention) -> Tensor:
        """What the last layer makes of a chunk's tokens, ``(sequences, length, dim)``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """What is predicted from it; of any tokens, by themselves."""
        ...


class BuiltIn:
    """The built-in transformer, its layers given chunks to attend to."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self.keeps_documents_apart = not model.across_documents
        self.vocab_size = model.embed.num_embeddings
        self.depth = len(model.layers)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: ChunkAttention) -> Tensor:
        rotation = rotary(position_ids, self._model.shape.head_dim)
        hidden = self._model.embed(input_ids)
        for number, layer in enumerate(self._model.layers):

            def attend(query: Tensor, key: Tensor, value: Tensor, number: int = number) -> Tensor:
                return attention(number, query, key, value, _masked)

            hidden = layer(hidden, attend, rotation)
        return self._model.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._model.embed.weight.T


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return nnf.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def chunkable(model: Learner, longest: int | None = None) -> Chunkable:
    """A model as one that learns sequences in chunks, of at most `longest` tokens; refused where it cannot."""
    if isinstance(model, Transformer):
        return BuiltIn(model)
    from penstock.train.models.huggingface import CausalLM

    if isinstance(model, CausalLM):
        from penstock.train.long.huggingface import as_chunkable

        return as_chunkable(model, longest)
    raise ConfigError(
        f"use_chunked_training: {type(model).__name__} learns no sequences that could be cut: leave it away, or choose "
        "tiny, small, act or a model of transformers (--model)"
    )

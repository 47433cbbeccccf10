"""The loss over a vocabulary without its logits: they are made some tokens at a time, and again when going back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from penstock.feed import IGNORED_LABEL

_LOGITS_BYTES = 64 << 20
"""As many logits are made at a time as fit: enough to keep a device busy, little beside a model."""


def vocabulary_loss(hidden: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of ``hidden @ embeddings.T``, summed in float64 over the places that have a label.

    Logits are made in autocast's type where there is one, and each loss in fp32, as `summed_cross_entropy` does. Beside
    hidden states and embeddings nothing is kept; going back costs one more product with the embeddings.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return _VocabularyLoss.apply(hidden.flatten(0, -2), embeddings, labels.flatten(), dtype)  # pyright: ignore


def _pieces(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, _LOGITS_BYTES // (4 * vocabulary))
    return [slice(start, start + size) for start in range(0, rows, size)]


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embeddings: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, embeddings, labels)
        ctx.dtype = dtype
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = embeddings.to(dtype).T
            for part in _pieces(len(hidden), len(embeddings)):
                logits = _at_least_fp32(hidden[part].to(dtype) @ head)
                losses = nnf.cross_entropy(logits, labels[part], ignore_index=IGNORED_LABEL, reduction="none")
                total += losses.double().sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        hidden, embeddings, labels = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_embeddings = torch.zeros_like(embeddings)
        with torch.autocast(hidden.device.type, enabled=False):
            head = embeddings.to(ctx.dtype)
            for part in _pieces(len(hidden), len(embeddings)):
                states, wanted = hidden[part].to(ctx.dtype), labels[part]
                learned = wanted != IGNORED_LABEL
                error = _at_least_fp32(states @ head.T).softmax(-1)
                error.scatter_add_(1, wanted.where(learned, 0)[:, None], -torch.ones_like(error[:, :1]))
                error *= learned[:, None] * grad.to(error.dtype)
                error = error.to(ctx.dtype)
                of_hidden[part] = error @ head
                of_embeddings += error.T @ states
        return of_hidden, of_embeddings, None, None


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

"""The loss of some logits and its gradient at once, with one copy of them in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.feed import IGNORED_LABEL


@torch.no_grad()
def loss_and_gradient(logits: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed in float64 over the places that have a label, over `weight`; and its gradient.

    Args:
        logits: ``(sequences, length, vocabulary)``, in any type; each loss is computed in fp32 at least.
        labels: ``(sequences, length)``, the token that follows or `IGNORED_LABEL`.
        weight: What the sum is divided by.

    Returns:
        The loss, and its gradient in the type and shape of the logits.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    error = logits.flatten(0, 1).to(wide, copy=True)
    learned = (labels.flatten() != IGNORED_LABEL)[:, None]
    wanted = labels.flatten()[:, None].where(learned, 0)
    error -= error.amax(1, keepdim=True)
    said = error.gather(1, wanted)
    error.exp_()
    total = error.sum(1, keepdim=True)
    losses = (total.log() - said).where(learned, 0)
    scale = learned.to(wide) / weight
    error *= scale / total
    error.scatter_add_(1, wanted, -scale)
    return losses.double().sum() / weight, error.to(logits.dtype).view_as(logits)

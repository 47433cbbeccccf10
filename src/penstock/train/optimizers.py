"""AdamW with the settings of a run; weight decay on matrices alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """What the optimizer is told; the learning rate comes from the schedule, step by step."""

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95


def adamw(network: nn.Module, settings: AdamSettings) -> torch.optim.AdamW:
    """An optimizer over what is trained of a network.

    Matrices and embeddings decay; norms and biases do not: pulling a scale towards zero is no regularisation. On CUDA
    all parameters go in one kernel.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    on_cuda = all(parameter.is_cuda for parameter in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        fused=True if on_cuda else None,
    )

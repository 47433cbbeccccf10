"""The counting model: a witness that is not the ledger.

One parameter per sample id and SGD with learning rate 1, so a checkpoint's weights are the number of times each sample
was learned by these very weights. Crash tests read it beside the audit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.feed import Batch
from penstock.train.models.base import Learner


class CountingModel(Learner):
    """``counts[i]`` grows by one whenever a batch finishes sample i."""

    def __init__(self, total_samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(total_samples))

    def loss_sum(self, batch: Batch, rows: slice) -> Tensor:
        if rows.start != 0:  # a batch's samples are counted with its first part
            return self.counts.sum() * 0.0
        return -self.counts[torch.from_numpy(batch.sample_ids)].sum()

    def weight(self, batch: Batch) -> float:
        return 0.0  # counts are not divided by anything

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    @property
    def clips_gradients(self) -> bool:
        return False

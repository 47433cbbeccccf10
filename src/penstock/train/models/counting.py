"""The counting model: a witness that is not the ledger.

One parameter per sample id and SGD with learning rate 1, so a checkpoint's weights are the number of times each sample
was learned by these very weights. Crash tests read it beside the audit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.train.device_batch import DeviceBatch
from penstock.train.models.base import Learner
from penstock.train.optimizers import AdamSettings


class CountingModel(Learner):
    """``counts[i]`` grows by one whenever a batch finishes sample i."""

    def __init__(self, total_samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(total_samples))

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        if rows.start != 0:  # a batch's samples are counted with its first part
            return self.counts.sum() * 0.0
        return -self.counts[torch.from_numpy(batch.source.sample_ids).to(self.counts.device)].sum()

    def weight(self, batch: DeviceBatch) -> float:
        return 0.0  # counts are not divided by anything

    def optimizer(self, settings: AdamSettings) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    @property
    def is_witness(self) -> bool:
        return True

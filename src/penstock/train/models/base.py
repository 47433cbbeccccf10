"""What training asks of a model."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from penstock.train.device_batch import DeviceBatch
from penstock.train.optimizers import AdamSettings, adamw


class Learner(nn.Module):
    """A model that knows its loss and its optimizer."""

    @abstractmethod
    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        """Summed loss over some sequences of a batch."""

    def weight(self, batch: DeviceBatch) -> float:
        """What this batch adds to the number that the summed loss is divided by, over all ranks and at least 1."""
        return float(batch.num_tokens)

    def optimizer(self, settings: AdamSettings) -> torch.optim.Optimizer:
        """The optimizer this model is trained with."""
        return adamw(self, settings)

    @property
    def network(self) -> nn.Module:
        """The module whose weights a checkpoint holds, by its own names."""
        return self

    @property
    def is_witness(self) -> bool:
        """Whether it is trained to count: without schedule, clipping or autocast, and with nothing to evaluate."""
        return False

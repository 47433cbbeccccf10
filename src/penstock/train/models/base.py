"""What training asks of a model."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from penstock.feed import Batch


class Learner(nn.Module):
    """A model that knows its loss and its optimizer."""

    @abstractmethod
    def loss_sum(self, batch: Batch, rows: slice) -> Tensor:
        """Summed loss over some sequences of a batch."""

    @abstractmethod
    def weight(self, batch: Batch) -> float:
        """What this batch adds to the number that the summed loss is divided by, over all ranks and at least 1."""

    @abstractmethod
    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer this model is trained with."""

    @property
    def clips_gradients(self) -> bool:
        """Whether `max_grad_norm` applies."""
        return True

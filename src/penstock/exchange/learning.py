"""Local work: from a window's batches to a change of the weights, and what a change does to the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import TrainError
from penstock.exchange.layout import WeightVector
from penstock.exchange.settings import ExchangeSettings
from penstock.feed import Batch
from penstock.train.device_batch import to_device
from penstock.train.models import Learner
from penstock.train.optimizers import AdamSettings
from penstock.train.schedule import Schedule
from penstock.train.trainer import State, Trainer

Goes = Callable[[], bool]
"""Whether to go on; asked between batches."""


@dataclass(frozen=True, slots=True)
class LocalWork:
    """What a miner's window came to."""

    delta: Tensor
    """What is to be taken off the weights: the gradient, or what local steps have taken off."""
    loss: float
    """Mean over tokens, of the weights it began with, or while it went on learning."""
    num_tokens: int


class LocalLearner:
    """A model that learns a worker's pages, always from the weights that everybody has."""

    def __init__(self, model: Learner, vector: WeightVector, settings: ExchangeSettings, device: torch.device) -> None:
        self._settings = settings
        self._vector = vector
        self._trainer = Trainer(
            model,
            schedule=Schedule(learning_rate=settings.inner_learning_rate),
            adam=AdamSettings(weight_decay=settings.weight_decay),
            max_grad_norm=settings.max_grad_norm,
            device=device,
        )

    def learn(self, weights: Tensor, batches: Sequence[Batch], goes_on: Goes) -> LocalWork | None:
        """Learn batches beginning with these weights; None where it was told to stop."""
        self._vector.write(weights)
        work = self._gradient if self._settings.inner == "gradient" else self._steps
        done = work(weights, batches, goes_on)
        if done is not None and not (math.isfinite(done.loss) and bool(torch.isfinite(done.delta).all())):
            raise TrainError(f"the loss is {done.loss}: lower inner_learning_rate in a new run")
        return done

    def mean_loss(self, weights: Tensor, batches: Sequence[Batch]) -> float:
        """Mean loss over the tokens of some batches; nothing is learned."""
        self._vector.write(weights)
        total, tokens = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                fed = to_device(batch, self._trainer.device)
                total += float(self._trainer.loss_sum(fed))
                tokens += fed.num_tokens
        return total / max(1, tokens)

    def state(self) -> State:
        """The local optimizer's memory: what makes a restarted miner go on as it was."""
        return {name: each for name, each in self._trainer.state().items() if name.startswith("optimizer.")}

    def load_state(self, optimizer: State) -> None:
        whole = self._trainer.state()
        kept = {name: each for name, each in whole.items() if not name.startswith("optimizer.")}
        self._trainer.load_state({**kept, **optimizer})

    def _gradient(self, weights: Tensor, batches: Sequence[Batch], goes_on: Goes) -> LocalWork | None:
        """The gradient of the mean loss over all batches: a share of one step of ordinary data parallelism."""
        trainer = self._trainer
        trainer.model.zero_grad(set_to_none=True)
        fed = [to_device(batch, trainer.device) for batch in batches]
        weight = max(1.0, sum(trainer.model.weight(batch) for batch in fed))
        total = 0.0
        for batch in fed:
            if not goes_on():
                return None
            with trainer.computing():
                loss = trainer.model.loss_sum(batch, slice(0, len(batch))) / weight
            loss.backward()
            total += float(loss.detach())
        delta = self._vector.gradients()
        trainer.model.zero_grad(set_to_none=True)
        return LocalWork(delta, total, sum(batch.num_tokens for batch in fed))

    def _steps(self, weights: Tensor, batches: Sequence[Batch], goes_on: Goes) -> LocalWork | None:
        losses, tokens = 0.0, 0
        for number, batch in enumerate(batches, start=1):
            if not goes_on():
                return None
            made = self._trainer.step(batch, number)
            losses += made.loss * made.num_tokens
            tokens += made.num_tokens
        return LocalWork(weights - self._vector.read(), losses / max(1, tokens), tokens)

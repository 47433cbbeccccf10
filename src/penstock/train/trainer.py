"""A model and its optimizer: one step at a time, and all their state as one flat dict of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.errors import CheckpointError, TrainError
from penstock.feed import Batch
from penstock.train.models import Learner

State = dict[str, Tensor]
"""Everything a replica is, by name: ``model.*``, ``optimizer.*``, ``rng.*``."""


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    num_tokens: int


class Together(Protocol):
    """The ranks that share every batch; see `Ranks`."""

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        ...

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of all ranks, in place."""
        ...


class Trainer:
    """Learns batches. Knows nothing of ledgers, files or other replicas."""

    def __init__(self, model: Learner, *, learning_rate: float, accumulation: int, max_grad_norm: float) -> None:
        self.model = model
        self.optimizer = model.optimizer(learning_rate)
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm

    def step(self, batch: Batch, together: Together | None = None) -> StepResult:
        """One optimizer step: the loss is normalised by the weight of the whole batch, however it is split.

        Args:
            batch: What to learn; of several ranks, this one's share, perhaps without a sequence.
            together: The ranks that have the other shares.
        """
        self.optimizer.zero_grad(set_to_none=True)
        sequences, tokens = len(batch.input_ids), batch.num_tokens
        weight = self.model.weight(batch) if sequences else 0.0
        if together is not None:
            (weight,) = together.total([weight])
        weight = max(1.0, weight)
        total = 0.0
        rows = max(1, -(-sequences // self._accumulation))
        for start in range(0, sequences, rows):
            loss = self.model.loss_sum(batch, slice(start, start + rows)) / weight
            loss.backward()
            total += loss.item()
        if together is not None:
            total, tokens = together.total([total, tokens])
        if not math.isfinite(total):
            raise TrainError(
                f"the loss is {total} on samples {_told(batch.spans[:, 0])}: look at these samples, "
                "or begin a new run with a lower learning_rate; the last commit is kept"
            )
        if together is not None:
            together.sum_gradients(self.model.parameters())
        if self._max_grad_norm and self.model.clips_gradients:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        return StepResult(total, int(tokens))

    def state(self) -> State:
        """A copy of everything, detached from what training goes on to change."""
        tensors: State = {f"model.{name}": tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            for name, value in slots.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{name}"] = value.detach().clone()
        tensors["rng.torch"] = torch.get_rng_state()
        return tensors

    def load_state(self, tensors: State) -> None:
        """Become the replica that `state` described; every tensor must fit."""
        model = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        try:
            self.model.load_state_dict(model, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, slot = name.split(".", 2)
                slots.setdefault(int(index), {})[slot] = tensor.clone()
        described = self.optimizer.state_dict()
        described["state"] = slots
        self.optimizer.load_state_dict(described)
        torch.set_rng_state(tensors["rng.torch"])


def _told(sample_ids: np.ndarray) -> str:
    return f"{sample_ids.min()} to {sample_ids.max()}" if len(sample_ids) else "of other ranks"


def merge(base: State, replicas: list[tuple[float, State]], how: str) -> State:
    """Make one state of several that set out from `base`.

    Args:
        base: The state all replicas began the round with.
        replicas: Each with its weight; in a fixed order, so that the sum is the same every time.
        how: ``mean`` weighs by the weights; ``sum`` adds up what each replica has changed. Optimizer state is always
            averaged.
    """
    merged: State = {}
    for name in dict.fromkeys(name for _, state in replicas for name in state):
        present = [(weight, state[name]) for weight, state in replicas if name in state]
        first = present[0][1]
        if not first.is_floating_point():
            merged[name] = first
        elif name.endswith(".step"):
            merged[name] = torch.stack([tensor for _, tensor in present]).amax(0)
        else:
            # Moments are averages by nature: adding up their changes could make a variance negative.
            rule = "mean" if name.startswith("optimizer.") else how
            merged[name] = _combined(base.get(name), present, rule).to(first.dtype)
    return merged


def _combined(base: Tensor | None, present: list[tuple[float, Tensor]], how: str) -> Tensor:
    """One tensor of all replicas, summed in float64 in their order; memory for one."""
    if how == "mean":
        total = sum(weight for weight, _ in present)
        result = torch.zeros_like(present[0][1], dtype=torch.float64)
        for weight, tensor in present:
            result.add_(tensor, alpha=weight / total)
        return result
    start = torch.zeros_like(present[0][1]) if base is None else base
    result = start.double()
    for _, tensor in present:
        result.add_(tensor.double().sub_(start))
    return result

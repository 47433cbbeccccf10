"""A model and its optimizer: one step at a time, and all their state as one flat dict of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from penstock.errors import CheckpointError, TrainError
from penstock.feed import Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.models import Learner
from penstock.train.optimizers import AdamSettings
from penstock.train.schedule import Schedule

State = dict[str, Tensor]
"""Everything a replica is, by name, on the CPU: ``model.*``, ``optimizer.*``, ``rng.*``, ``skips``."""

_SKIPS = "skips"
"""How many batches in a row, up to here, could not be learned; states of before do not say."""

OnNan = Literal["stop", "skip"]
Precision = Literal["fp32", "bf16"]

Computing = Callable[[], AbstractContextManager[None]]
"""Within it, a model computes in the precision of the run."""

_SKIPS_IN_A_ROW = 20
"""So many batches that cannot be learned are no bad data: the model is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    loss: float
    num_tokens: int
    learning_rate: float
    grad_norm: float
    """Of all gradients together, before they are clipped; 0 for a model whose gradients are not looked at."""
    skipped: bool = False
    """Loss or gradients were not finite, and the weights are what they were."""
    ideal_s: float | None = None
    """How long the devices would take for it at their peak; None where that is not known."""

    def told(self, step_s: float, wait_s: float) -> dict[str, Any]:
        """What a step's event says of it, whoever made it."""
        return {
            "loss": round(self.loss, 6),
            "num_tokens": self.num_tokens,
            "learning_rate": self.learning_rate,
            "grad_norm": round(self.grad_norm, 6),
            "skipped": self.skipped,
            "step_s": round(step_s, 6),
            "wait_s": round(wait_s, 6),
            "tokens_per_s": round(self.num_tokens / max(1e-9, step_s + wait_s), 1),
            "mfu": None if self.ideal_s is None else round(self.ideal_s / max(1e-9, step_s + wait_s), 4),
        }


class Together(Protocol):
    """The ranks that share every batch."""

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        ...

    def expect_gradients(self, parameters: Iterable[Tensor]) -> None:
        """The backward pass that comes is the step's last here; may be left out, for one that is not."""
        ...

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of all ranks, in place."""
        ...


class First(Protocol):
    """How ranks get what rank 0 has; alone, that is one's own."""

    @property
    def is_first(self) -> bool: ...

    def from_first(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 acts, and everybody gets what came of it; its failure too."""
        ...

    def state_from_first(self, state: State | None) -> State:
        """The state that rank 0 has."""
        ...


class InChunks(Protocol):
    """Learning of sequences too long for one piece, in chunks of their tokens."""

    def learn(self, batch: DeviceBatch, rows: slice, weight: float, computing: Computing) -> Tensor:
        """Add the gradients of some sequences' summed loss over `weight`; returns that loss."""
        ...

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        """The summed loss of some sequences; nothing is learned."""
        ...


@contextmanager
def computing(device: torch.device, precision: Precision) -> Iterator[None]:
    """While inside, models on a device compute in some precision; their weights are fp32 always."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        yield


class Trainer:
    """Learns batches. Knows nothing of ledgers, files or other replicas.

    Weights, gradients and optimizer state are fp32; with ``bf16`` the model computes under autocast.
    """

    def __init__(
        self,
        model: Learner,
        *,
        schedule: Schedule,
        adam: AdamSettings | None = None,
        accumulation: int = 1,
        max_grad_norm: float = 1.0,
        precision: Precision = "fp32",
        on_nan: OnNan = "stop",
        in_chunks: InChunks | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.model = model.to(self.device)
        self.optimizer = model.optimizer(adam or AdamSettings())
        self._schedule = schedule
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm
        self._precision: Precision = precision
        self._on_nan: OnNan = on_nan
        self._in_chunks = in_chunks
        self._skips_in_a_row = 0

    def step(self, batch: Batch | DeviceBatch, number: int, together: Together | None = None) -> StepResult:
        """One optimizer step: the loss is normalised by the weight of the whole batch, however it is split.

        Args:
            batch: On the device already, or to be brought there; of several ranks, this one's share, perhaps without a
                sequence.
            number: Which step of the run this is, from 1: it says the learning rate.
            together: The ranks that have the other shares.
        """
        fed = batch if isinstance(batch, DeviceBatch) else to_device(batch, self.device)
        rate = self._set_learning_rate(number)
        self.optimizer.zero_grad(set_to_none=True)
        weight, tokens = self.model.weight(fed) if len(fed) else 0.0, fed.num_tokens
        if together is not None:
            (weight,) = together.total([weight])
        weight = max(1.0, weight)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rows = max(1, -(-len(fed) // self._accumulation))
        for start in range(0, len(fed), rows):
            last = start + rows >= len(fed)
            total += self._learn(fed, slice(start, start + rows), weight, together if last else None)
        if together is not None:
            together.sum_gradients(self.model.parameters())
        norm = self._clip()
        found, grad_norm = torch.stack([total, norm.double()]).tolist()  # the step's one wait for the device
        if together is not None:  # every rank has the same sums and the same gradients, and decides the same
            found, tokens = together.total([found, tokens])
        finite = math.isfinite(found) and math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
            self._skips_in_a_row = 0
        else:
            self._refuse(fed, number, found, grad_norm)
        return StepResult(
            loss=found, num_tokens=int(tokens), learning_rate=rate, grad_norm=grad_norm, skipped=not finite
        )

    def loss_sum(self, batch: DeviceBatch) -> Tensor:
        """The summed loss of a batch; nothing is learned."""
        with self.computing():
            return (self._in_chunks or self.model).loss_sum(batch, slice(0, len(batch)))

    def _learn(self, batch: DeviceBatch, rows: slice, weight: float, together: Together | None = None) -> Tensor:
        """Add the gradients of some sequences; returns what they add to the loss.

        Args:
            batch: Of which they are a part.
            rows: Which ones.
            weight: What the summed loss is divided by.
            together: The ranks to be told, where these are the step's last sequences here.
        """
        if self._in_chunks is not None:  # many backward passes: none is known to be the last
            return self._in_chunks.learn(batch, rows, weight, self.computing)
        with self.computing():
            loss = self.model.loss_sum(batch, rows) / weight
        if together is not None:
            together.expect_gradients(self.model.parameters())
        loss.backward()
        return loss.detach()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While inside, the model computes in the run's precision."""
        precision: Precision = "fp32" if self.model.is_witness else self._precision
        with computing(self.device, precision):
            yield

    def _set_learning_rate(self, number: int) -> float:
        if self.model.is_witness:
            return float(self.optimizer.param_groups[0]["lr"])
        rate = self._schedule.at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _clip(self) -> Tensor:
        """Scale gradients down to the greatest norm allowed; returns what it was, not waiting for the device."""
        if self.model.is_witness:
            return torch.zeros((), device=self.device)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self._max_grad_norm:
            clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        return norm

    def _refuse(self, batch: DeviceBatch, number: int, loss: float, grad_norm: float) -> None:
        """Leave the weights alone; by policy that is all, or the end."""
        self._forget_gradients()
        self._skips_in_a_row += 1
        ids = batch.source.spans[:, 0]
        samples = f"samples {ids.min()} to {ids.max()}" if len(ids) else "samples of other ranks"
        where = f"step {number}: the loss is {loss} and the gradients' norm {grad_norm} on {samples}"
        if self._on_nan == "stop":
            raise TrainError(
                f"{where}: look at these samples (`penstock skip` leaves some out), lower learning_rate in a new run, "
                "or go on without such batches (--on-nan skip); the last commit is kept"
            )
        if self._skips_in_a_row >= _SKIPS_IN_A_ROW:
            raise TrainError(
                f"{where}, as on {_SKIPS_IN_A_ROW} batches in a row: this is the model, not the data; begin a new run "
                "with a lower learning_rate; the last commit is kept"
            )

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def tensors_alike(self) -> Iterable[Tensor]:
        """What has the same bits on every rank."""
        return self.model.parameters()

    def begin(self, parts: Iterable[State] | None, first: First) -> None:
        """Become what rank 0 holds the state of; all ranks at the same time.

        Args:
            parts: The state, in pieces that are asked for one after another; None on all other ranks.
            first: The way from rank 0 to the others.
        """
        whole: State | None = None
        if parts is not None:
            whole = {}
            for part in parts:
                whole.update(part)
        self.load_state(first.state_from_first(whole))

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more will be learned; `error` is why, where it did not end in order."""

    def state(self) -> State:
        """Everything on the CPU, to be used up before training goes on; here a copy, which may be kept."""
        tensors: State = {f"model.{name}": _copied(tensor) for name, tensor in own_tensors(self.model).items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            for name, value in slots.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{name}"] = _copied(value)
        tensors[_SKIPS] = torch.tensor([self._skips_in_a_row])
        tensors["rng.torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def load_state(self, tensors: State) -> None:
        """Become the replica that `state` described; every tensor must fit."""
        given = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        own = own_tensors(self.model)
        wrong = sorted(given.keys() ^ own.keys()) or [name for name in own if own[name].shape != given[name].shape]
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {', '.join(wrong[:3])} {'and more ' * (len(wrong) > 3)}"
                "missing, unknown or of another shape"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, slot = name.split(".", 2)
                slots.setdefault(int(index), {})[slot] = tensor.clone()
        described = self.optimizer.state_dict()
        described["state"] = slots
        self.optimizer.load_state_dict(described)
        self._skips_in_a_row = int(tensors[_SKIPS]) if _SKIPS in tensors else 0
        torch.set_rng_state(tensors["rng.torch"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:  # a run may come from a machine without
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)


@contextmanager
def closing_trainer(trainer: Trainer) -> Iterator[Trainer]:
    """A trainer that is closed at the end, whatever that is."""
    try:
        yield trainer
    except BaseException as error:
        trainer.close(error)
        raise
    trainer.close()


def first_state(model: Learner) -> State:
    """What a run begins with: a fresh model that has learned nothing. No copy: the tensors are the model's own."""
    tensors: State = {f"model.{name}": tensor.detach().contiguous() for name, tensor in own_tensors(model).items()}
    return {**tensors, _SKIPS: torch.tensor([0]), "rng.torch": torch.get_rng_state()}


def own_tensors(model: Learner) -> State:
    """The network's own tensors by name; those that are one and the same (tied) by their first name alone."""
    seen: set[tuple[int, torch.Size]] = set()
    kept: State = {}
    for name, tensor in model.network.state_dict().items():
        place = tensor.data_ptr(), tensor.shape
        if place not in seen or not tensor.numel():
            kept[name] = tensor
        seen.add(place)
    return kept


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


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
        if name == _SKIPS:  # where one replica could learn, the model is not broken
            merged[name] = torch.stack([tensor for _, tensor in present]).amin(0)
        elif not first.is_floating_point():
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

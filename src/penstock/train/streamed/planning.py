"""What a streamed run will need and how long its steps will take, worked out before anything is begun.

    sizes of the model ─┐                 ┌─► bytes on the host, against what is free there
    batch, precision   ─┼─► plan (pure) ──┼─► bytes on the device, against the budget; layers that stay there
    speeds, memory     ─┘                 └─► seconds a step by term, and the one that binds

What takes up memory for good is counted to the byte; what a layer needs while it computes is estimated. What cannot
fit is refused with what would.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from penstock.errors import ConfigError
from penstock.train.checkpoints import FILE_BYTES
from penstock.train.chunk_size import free_bytes
from penstock.train.config import TrainingConfig
from penstock.train.streamed.host import HostGradients, HostState
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.passes import LOGITS_BYTES
from penstock.train.streamed.placing import SPARE_BYTES, budget_bytes
from penstock.train.streamed.resident import Resident
from penstock.train.streamed.sizes import ModelSizes, sizes_of
from penstock.train.streamed.speeds import Speeds, measure
from penstock.train.streamed.streaming import SLOTS
from penstock.train.streamed.visiting import VisitingAdam

Term = Literal["compute", "link", "optimizer"]

_GIB = 2**30
_COMPUTE_OPERATIONS = 8
"""A parameter and token: forward, forward again, and backward, which is two."""
_OPTIMIZER_BYTES = 28
"""A parameter: weights and moments read and written, gradients read, the image written."""


_VISIT_BYTES = 14
"""A parameter that is stepped on the device and goes home, each way: weights, moments, and gradients or image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be learned at a time, and how."""

    batch_size: int
    length: int
    parts: int
    bf16: bool
    offload: bool
    world: int
    ranks: int
    """Of this machine."""

    @property
    def rows(self) -> int:
        """Sequences of a rank."""
        return -(-self.batch_size // self.world)

    @property
    def part_rows(self) -> int:
        return -(-self.rows // self.parts)

    @property
    def image(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def gradients(self, unit: Unit) -> torch.dtype:
        """As `StreamedTrainer` has them."""
        return torch.bfloat16 if self.bf16 and self.parts == 1 and unit.index > 0 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will need; the fields of its event."""

    parameters: int
    layers: int
    host_bytes: int
    """All ranks of a machine together: weights, moments, images, gradients, and what passes through."""
    host_free_bytes: int
    device_bytes: int
    """Of each device, without layers that stay there."""
    device_budget_bytes: int | None
    """None where the host computes."""
    residents: int
    """Units that stay on the device: the edge, and layers."""
    compute_s: float
    link_s: float
    optimizer_s: float
    step_s: float
    """Of the longest term: the others go on beside it."""
    binds: Term

    def as_event(self) -> dict[str, Any]:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}


def plan_run(
    config: TrainingConfig, model_config: str, *, vocab_size: int, device: torch.device, world: int, ranks: int
) -> Plan:
    """The plan of a run on this machine.

    Args:
        config: Settled.
        model_config: Of the model, as JSON.
        vocab_size: Entries of the tokenizer.
        device: Of this rank; those of others are taken to be like it.
        world: How many ranks there are,
        ranks: and how many of them on this machine.

    Raises:
        ConfigError: It does not fit; says what would.
    """
    precision = "bf16" if config.precision == "bf16" else "fp32"
    task = Task(
        batch_size=config.batch_size,
        length=config.max_seq_len,
        parts=config.gradient_accumulation_steps,
        bf16=precision == "bf16",
        offload=config.offload_activations and device.type != "cpu",
        world=world,
        ranks=ranks,
    )
    sizes = sizes_of(model_config, vocab_size=vocab_size, ranks=ranks)
    budget = budget_bytes(device, config.gpu_budget_gib)
    free, speeds = free_bytes(), measure(device, precision)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # nothing of the measuring stays
    made = make_plan(sizes, task, speeds=speeds, budget=budget, host_free=free)
    require_fit(made, sizes, task)
    return made


def make_plan(sizes: ModelSizes, task: Task, *, speeds: Speeds, budget: int | None, host_free: int) -> Plan:
    """The plan, by arithmetic alone."""
    on_device = device_bytes(sizes, task)
    residents = _residents(sizes, task, budget - on_device) if budget is not None and task.world == 1 else 0
    streamed = sum(unit.size for unit in sizes.units[residents:])
    terms = _terms(sizes, task, speeds, streamed)
    binds = max(terms, key=lambda term: terms[term])
    return Plan(
        parameters=sizes.parameters,
        layers=len(sizes.units) - 1,
        host_bytes=_on_host(sizes, task, budget),
        host_free_bytes=host_free,
        device_bytes=on_device,
        device_budget_bytes=budget,
        residents=residents,
        compute_s=terms["compute"],
        link_s=terms["link"],
        optimizer_s=terms["optimizer"],
        step_s=terms[binds],
        binds=binds,
    )


def _on_host(sizes: ModelSizes, task: Task, budget: int | None) -> int:
    """What the host needs; where it computes, for that too."""
    return host_bytes(sizes, task) + (0 if budget is not None else task.ranks * device_bytes(sizes, task))


def host_bytes(sizes: ModelSizes, task: Task) -> int:
    """Of one machine; that of a model that is just being taken over, where it is more."""
    state = HostState.num_bytes(sizes.units, task.image)
    gradients = task.ranks * HostGradients.num_bytes(sizes.units, task.gradients)
    sums = 4 * sum(unit.size for unit in sizes.units) if task.world > 1 else 0
    states = task.ranks * task.rows * task.length * sizes.width * task.image.itemsize * len(sizes.units)
    a_file = 2 * min(FILE_BYTES, 4 * sizes.parameters)  # of a checkpoint, as it is written or read
    training = state + gradients + sums + a_file + task.offload * states
    beginning = (task.ranks * 4 + 4 + task.bf16 * 2) * sizes.parameters  # every rank builds the model once
    return max(training, beginning)


def device_bytes(sizes: ModelSizes, task: Task) -> int:
    """Of one device, without layers that stay there."""
    image, largest = task.image.itemsize, max(sizes.units[1:], key=lambda unit: unit.size)
    tokens, at_once = task.rows * task.length, task.part_rows * task.length
    edge = sizes.units[0].size * (image + 4)
    slots = largest.size * (SLOTS * image + 2 * task.gradients(largest).itemsize)
    kept = tokens * sizes.width * image * (3 if task.offload else len(sizes.units))
    logits = min(LOGITS_BYTES, at_once * sizes.vocab * 4) * (4 + 2 * image) // 4
    layer = at_once * (16 * sizes.width + 6 * sizes.inner) * image + largest.size * image
    return edge + slots + kept + max(logits, layer)


def _residents(sizes: ModelSizes, task: Task, left: int) -> int:
    """How many units stay on the device, as `StreamedTrainer` counts them."""
    left -= SPARE_BYTES + VisitingAdam.num_bytes(task.gradients(sizes.units[1]))
    for count, unit in enumerate(sizes.units):
        there = unit.size * (task.image.itemsize + 4) if count == 0 else 0
        left -= Resident.num_bytes(unit, task.gradients(unit)) - there
        if left < 0:
            return count
    return len(sizes.units)


def _terms(sizes: ModelSizes, task: Task, speeds: Speeds, streamed: int) -> dict[Term, float]:
    """Seconds of a step by what takes them, each by itself; `streamed` parameters are not on the device for good."""
    tokens = task.batch_size * task.length / task.world
    back = task.gradients(sizes.units[1]).itemsize
    visiting = streamed / 2 if speeds.link_bytes and task.world == 1 else 0  # every other unit is stepped there
    sums = task.ranks * back + 8 if task.world > 1 else 0
    moved = max(2 * task.image.itemsize, back) * streamed + _VISIT_BYTES * visiting
    link = moved / speeds.link_bytes if speeds.link_bytes else 0.0
    return {
        "compute": _COMPUTE_OPERATIONS * sizes.at_work * tokens / speeds.flops,
        "link": link,
        "optimizer": (_OPTIMIZER_BYTES + sums) * (streamed - visiting) / speeds.memory_bytes,
    }


def require_fit(plan: Plan, sizes: ModelSizes, task: Task) -> None:
    """Refuse what cannot fit, with what would."""
    if plan.host_bytes > plan.host_free_bytes:
        raise ConfigError(
            f"{sizes.parameters / 1e9:.3g} B parameters need {_told(plan.host_bytes)} of host memory with optimizer "
            f"and gradients, and {_told(plan.host_free_bytes)} are free: {_what_fits_host(plan, sizes, task)}"
        )
    budget = plan.device_budget_bytes
    if budget is not None and plan.device_bytes + SPARE_BYTES > budget:
        raise ConfigError(
            f"{task.part_rows} sequences of {task.length} tokens at a time need about "
            f"{_told(plan.device_bytes + SPARE_BYTES)} of the GPU, and {_told(budget)} may be used: "
            f"{_what_fits_device(sizes, task, budget)}"
        )


def _what_fits_host(plan: Plan, sizes: ModelSizes, task: Task) -> str:
    else_more = "free host memory or use a machine with more"
    for layers in range(plan.layers - 1, 0, -1):
        units = sizes.units[: layers + 1]
        fewer = replace(sizes, units=units, parameters=sum(unit.size for unit in units))
        if _on_host(fewer, task, plan.device_budget_bytes) <= plan.host_free_bytes:
            return f"the same model with {layers} of its {plan.layers} layers would fit; else {else_more}"
    return f"train a smaller model, {else_more}"


def _what_fits_device(sizes: ModelSizes, task: Task, budget: int) -> str:
    """The least change that makes a task fit."""
    room = budget - SPARE_BYTES
    for offload in dict.fromkeys((task.offload, True)):
        parts = task.parts
        while parts <= task.rows:
            if device_bytes(sizes, replace(task, parts=parts, offload=offload)) <= room:
                also = " with --offload-activations" if offload and not task.offload else ""
                return f"--gradient-accumulation-steps {parts}{also} would fit"
            parts = parts + 1 if parts < 8 else 2 * parts
    least = device_bytes(sizes, replace(task, parts=task.rows, offload=True)) + SPARE_BYTES
    if least - SPARE_BYTES <= room:
        return f"--gradient-accumulation-steps {task.rows} with --offload-activations would fit"
    return (
        f"a sequence at a time with --offload-activations still needs {_told(least)}: raise --gpu-budget-gib, "
        "shorten sequences (--max-seq-len) or train a smaller model"
    )


def _told(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"

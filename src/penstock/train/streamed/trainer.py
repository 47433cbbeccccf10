"""A trainer for models larger than their device: the host holds them, and units come to the device when needed.

    step:   forward, head, backward (`passes.py`)      gradients arrive on the host, unit by unit (`collecting.py`)
            the norm of all gradients is known          residents are stepped on the device,
                                                        all others on the host, in the order they are needed next
    next:   a unit is loaded once it is stepped         (`stepping.py`, `loading.py`)

The mathematics is that of `Trainer` with fp32 weights: the whole gradient, its norm, AdamW; nothing is stale. Computing
is done with weights rounded to the run's precision. States are those of `Trainer` too, so either goes on with a run of
the other.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, TrainError
from penstock.feed import Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.models import Learner
from penstock.train.models.huggingface import CausalLM
from penstock.train.optimizers import AdamSettings
from penstock.train.ranks import Ranks
from penstock.train.schedule import Schedule
from penstock.train.streamed.boundaries import Boundaries
from penstock.train.streamed.collecting import Collector
from penstock.train.streamed.decoder import Decoder
from penstock.train.streamed.due import Due, DueStep, StepOrder
from penstock.train.streamed.host import HostGradients, HostState
from penstock.train.streamed.lanes import Lanes, Mark, wait_on_host
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.loading import Loader
from penstock.train.streamed.parity import PARTS, Whole, require_parity, small_batch, unchanging
from penstock.train.streamed.passes import Passes
from penstock.train.streamed.resident import Resident
from penstock.train.streamed.sharing import Sharing
from penstock.train.streamed.sizes import parameters_at_work
from penstock.train.streamed.speeds import peak_flops
from penstock.train.streamed.states import HostStates, parts_from_first
from penstock.train.streamed.stepping import HostAdam
from penstock.train.streamed.visiting import VisitingAdam
from penstock.train.trainer import First, OnNan, Precision, State, StepResult, Together, Trainer

SLOTS = 3
_SWITCH_S = 2e-4
"""How long a thread may keep others from Python: those that step and load have little to say, and must not wait long
behind the one that commands the device."""
_CONTEXT_BYTES = 920 << 20
"""What CUDA itself takes of a budget: its context and its kernels."""
SPARE_BYTES = 192 << 20
"""Of a budget, left for gaps between allocations."""
_LOOKS = 2
"""How often what is left of a budget is looked at: residents change where the peak of a step is."""


class StreamedTrainer(Trainer):
    """Learns batches as `Trainer` does, with weights, moments and gradients on the host."""

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
        device: torch.device | None = None,
        gpu_budget_gib: float | None = None,
        offload_activations: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Take a model over: its weights move into memory laid out for streaming, a layer at a time.

        Args:
            model: A decoder of `transformers`, on the CPU.
            schedule: Of the learning rate.
            adam: The optimizer's settings.
            accumulation: Parts a batch is computed in.
            max_grad_norm: Gradients are scaled down to it; 0 leaves them alone.
            precision: What is computed in.
            on_nan: What to do with a batch that cannot be learned.
            device: Where it is computed.
            gpu_budget_gib: Memory of the device to use: what is left of it keeps layers there for good. None: nearly
                all there is on a GPU, and no such layers on the CPU.
            offload_activations: Keep states between layers on the host.
            ranks: All ranks of the job, which take part at the same time.
        """
        if not isinstance(model, CausalLM):
            raise ConfigError("only models of transformers can be streamed: name one, or leave --streamed away")
        self.device = device or torch.device("cpu")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.model: CausalLM = model
        self._lm: Any = model.lm
        self._adam = adam or AdamSettings()
        self._schedule = schedule
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm
        self._precision: Precision = precision
        self._on_nan: OnNan = on_nan
        self._in_chunks = None
        self._skips_in_a_row = 0
        self._steps = 0
        self._largest = (0, 0)
        self._looks_left = _LOOKS
        self._torn = False
        """Whether a step has failed that had stepped some units already."""
        self._timings: dict[str, float] = {}
        self._order: StepOrder | None = None
        self._checking: list[Mark] | None = None
        """Where the marks of gradients go that are only looked at."""
        self._ranks = ranks = ranks or Ranks()
        self._decoder = decoder = Decoder(model)
        self.units = decoder.units(ranks.local_world)
        self._lanes = Lanes(self.device)
        self._sharing = Sharing(ranks, len(self.units))
        self._budget = budget_bytes(self.device, gpu_budget_gib)
        if gpu_budget_gib is not None and self._budget is not None:
            whole = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget / whole), self.device)
        peak = peak_flops(self.device, precision)
        self._token_s = 6 * parameters_at_work(decoder.lm) / (peak * ranks.world) if peak else None
        self._open(decoder, offload_activations)
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)

    def _open(self, decoder: Decoder, offload_activations: bool) -> None:
        pinned, image = self.device.type == "cuda", torch.bfloat16 if self._precision == "bf16" else torch.float32
        size = HostState.num_bytes(self.units, image)
        self._host = HostState(self.units, image_dtype=image, file=self._sharing.shared_file(size), pinned=pinned)
        self._states = HostStates(self.model.network, self.units, self._host)
        self._take_weights()
        dtype_of = self._gradient_dtype
        files = self._sharing.files_of_all(HostGradients.num_bytes(self.units, dtype_of))
        self._gradients = [
            HostGradients(self.units, dtype_of, file=file, pinned=pinned and rank == self._sharing.local_rank)
            for rank, file in enumerate(files)
        ]
        own = self._gradients[self._sharing.local_rank]
        self._optimizer = HostAdam(self.units, self._host, self._gradients, self._sharing, self._adam)
        self._visitor = VisitingAdam(self._host, own, self._sharing, self._adam, self._lanes)
        self._visiting: set[int] = set()
        self._due = Due()
        self._arrived: dict[int, Mark] = {}
        largest = max(unit.size for unit in self.units[1:])
        until = self._sharing.until_stepped
        self._loader = Loader(self.units, self._host, self._lanes, until, slots=SLOTS, size=largest)
        self._collector = Collector(self.units, own, self._lanes, slots=2)
        self._passes = Passes(
            decoder,
            self.units,
            self._loader,
            self._collector,
            Boundaries(self._lanes, on_host=offload_activations),
            self._lanes,
            measured=self._sharing.world == 1,
            on_gradients=self._on_gradients,
        )
        for buffer_owner in decoder.lm.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(self.device))

    def _gradient_dtype(self, unit: Unit) -> torch.dtype:
        at_once = self._accumulation == 1 and unit.index > 0
        return torch.bfloat16 if at_once and self._precision == "bf16" else torch.float32

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Move the model's weights over, and let go of them where they were."""
        for unit, host in zip(self.units, self._host.units, strict=True):
            for place in unit.places:
                if self._sharing.local_rank == 0:
                    place.of(host.weights).copy_(place.parameter)
                place.parameter.data = place.of(host.weights)
        if self._sharing.local_rank == 0:
            self._host.make_images()
        self._sharing.total(0.0)  # whoever goes on sees all weights

    # -- learning ------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | DeviceBatch, number: int, together: Together | None = None) -> StepResult:
        self._require_whole()
        began = time.perf_counter()
        self._lanes.forget_times()
        fed = batch if isinstance(batch, DeviceBatch) else to_device(batch, self.device)
        rate = self._schedule.at(number)
        weight, tokens = float(fed.num_tokens), float(fed.num_tokens)
        if together is not None:
            (weight,) = together.total([weight])
        rows = max(1, -(-len(fed) // self._accumulation))
        parts = [slice(start, start + rows) for start in range(0, len(fed), rows)]
        self._make_room(fed, rows)
        self._order = None
        if self._steps_at_once:
            self._order = StepOrder(number=self._steps + 1, learning_rate=rate, scale=1.0)
            self._torn = True  # until all of them are
        busy, waited = (self._optimizer.busy_s, self._visitor.busy_s), self._loader.waited_s
        try:
            total = self._learn_all(fed, parts, max(1.0, weight))
            launched = time.perf_counter()
            found, norm = self._found(total)
        except torch.OutOfMemoryError as error:
            raise self._too_large(fed, rows, error) from error
        except BaseException:
            self._passes.forget()
            raise
        if together is not None:
            found, tokens = together.total([found, tokens])
        finite = math.isfinite(found) and math.isfinite(norm)
        if self._order is None:
            self._use_what_is_left_of_the_device()
        if finite:
            self._apply(rate, norm)
            self._skips_in_a_row = 0
        else:
            self._refuse(fed, number, found, norm)
        self._torn = False
        if self._order is not None:  # units were stepped where they were
            self._use_what_is_left_of_the_device()
        self._timings = {
            "step": time.perf_counter() - began,
            "launch": launched - began,
            "wait": self._loader.waited_s - waited,
            "optimizer": self._optimizer.busy_s - busy[0],
            "visits": self._visitor.busy_s - busy[1],
        }
        return StepResult(
            loss=found,
            num_tokens=int(tokens),
            learning_rate=rate,
            grad_norm=norm,
            skipped=not finite,
            ideal_s=None if self._token_s is None else tokens * self._token_s,
        )

    def _learn_all(self, batch: DeviceBatch, parts: list[slice], weight: float) -> Tensor:
        """Make gradients; where memory is short for a batch that fitted before (it has gaps), with fewer residents."""
        try:
            return self._passes.learn(batch, parts, weight)
        except torch.OutOfMemoryError:
            if self._budget is None or not self._passes.residents or self._order is not None:
                raise
        self._passes.forget()
        self._budget -= 2 * max(Resident.num_bytes(unit, self._gradient_dtype(unit)) for unit in self.units[1:])
        self._give_residents_back()
        self._looks_left = _LOOKS
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self._passes.learn(batch, parts, weight)

    def _require_whole(self) -> None:
        if self._torn:
            raise TrainError(
                "a step has failed when some layers had learned and others had not: run the same command again to go "
                "on from the last commit"
            )

    @property
    def _steps_at_once(self) -> bool:
        """Whether units are stepped as their gradients arrive: only where nothing about the whole has to be known."""
        return not self._max_grad_norm and self._on_nan == "stop"

    def check_parity(self) -> None:
        """Refuse to train a model that computes something else streamed than as a whole; all ranks at the same time.

        Rank 0 computes a few tokens both ways, between steps; weights, moments and random numbers stay what they are.
        """
        self._settle()
        self._ranks.from_first(self._compare_with_whole)

    def _compare_with_whole(self) -> dict[str, Any]:
        fed = small_batch(self.model, self.device)
        kind, self._checking = str(self._lm.config.model_type), []
        try:
            with unchanging(self._lm, self.device):
                loss = float(self._passes.learn(fed, PARTS, float(fed.num_tokens)))
                for mark in self._checking:
                    wait_on_host(mark)
                whole = Whole(self.model, self.units, self._host)
                with whole.at_hand():
                    found = whole.compared_with(self._gradients_of)
                    parts = whole.compared_with_parts(self._decoder) if self._precision != "fp32" else None
        finally:
            self._checking = None
            self._passes.forget()
        decay = self._adam.weight_decay
        require_parity(kind, self._precision, loss, whole.loss, found, weight_decay=decay)
        if parts is not None:
            require_parity(kind, "fp32", parts[0], whole.loss, parts[1], weight_decay=decay)
        return {}

    def _gradients_of(self, unit: Unit) -> Tensor:
        """Those this rank made last."""
        resident = self._passes.residents.get(unit.index)
        own = self._gradients[self._sharing.local_rank]
        return own.units[unit.index] if resident is None else resident.gradients

    def _on_gradients(self, unit: Unit, arrived: Mark) -> None:
        if self._checking is not None:
            self._checking.append(arrived)
            return
        self._arrived[unit.index] = arrived
        self._optimizer.take(unit, arrived)
        if self._order is not None:
            self._make_due([unit], self._order)

    def _make_due(self, units: list[Unit], order: StepOrder) -> None:
        """Have units stepped, in this order, by whoever is free first."""
        for unit in units:
            self._sharing.will_step(unit)
            may_visit = unit.index in self._visiting
            arrived = self._arrived.get(unit.index)
            self._due.put(DueStep(unit=unit, order=order, arrived=arrived, may_visit=may_visit))
        self._optimizer.help_with(self._due, len(units))
        if self._visiting:
            self._visitor.help_with(self._due)

    def _found(self, total: Tensor) -> tuple[float, float]:
        """The loss and the norm of all gradients; the step's one wait for the device."""
        if self._sharing.world == 1:
            found, squared = torch.stack([total, self._collector.norm_squared]).tolist()
        else:
            found, squared = total.item(), self._sharing.total(self._optimizer.norm_squared())
        self._collector.norm_squared.zero_()
        return found, math.sqrt(squared) if squared >= 0 else math.nan

    def _apply(self, rate: float, norm: float) -> None:
        self._steps += 1
        scale = min(1.0, self._max_grad_norm / (norm + 1e-6)) if self._max_grad_norm else 1.0
        order = StepOrder(number=self._steps, learning_rate=rate, scale=scale)
        residents = self._passes.residents
        if self._order is None:
            self._make_due([unit for unit in self.units if unit.index not in residents], order)
        for resident in residents.values():
            resident.step(order, self._adam)

    def loss_sum(self, batch: DeviceBatch) -> Tensor:
        try:
            return self._passes.loss_sum(batch, slice(0, len(batch)))
        except BaseException:
            self._passes.forget()
            raise

    def timings(self) -> dict[str, float]:
        """Seconds by term of the last step; they overlap.

        Of the device: compute, link (the busier way, visits of the optimizer included). Of the host: optimizer, visits
        (how long the device's steps took), launch (commanding the device), of which wait is for weights to be stepped.
        """
        lanes = self._lanes.seconds()
        link = max(lanes["in"] + lanes["visit in"], lanes["out"] + lanes["visit out"])
        return {**self._timings, "compute": lanes["compute"], "link": link}

    def tensors_alike(self) -> Iterable[Tensor]:
        self._settle()
        return [unit.weights for unit in self._host.units]

    def _forget_gradients(self) -> None:
        self._collector.norm_squared.zero_()

    # -- memory of the device ------------------------------------------------------------------------------------------

    def _make_room(self, batch: DeviceBatch, rows: int) -> None:
        """A batch larger than any before needs more than was measured: residents leave first."""
        if self._budget is None:
            return
        length = batch.input_ids.shape[1] if len(batch) else 0
        size = len(batch) * length, min(rows, len(batch)) * length
        if size[0] > self._largest[0] or size[1] > self._largest[1]:
            self._largest = max(size[0], self._largest[0]), max(size[1], self._largest[1])
            self._give_residents_back()
            self._looks_left = _LOOKS
            torch.cuda.reset_peak_memory_stats(self.device)

    def _use_what_is_left_of_the_device(self) -> None:
        """After gradients that showed what a batch of this size needs: units move there while the budget lasts."""
        if not self._looks_left or self._budget is None or self._sharing.world > 1:
            return
        self._looks_left -= 1
        left = self._budget - SPARE_BYTES - torch.cuda.max_memory_allocated(self.device)
        count = len(self._passes.residents)
        if not self._visiting:
            left -= VisitingAdam.num_bytes(self._gradient_dtype(self.units[1]))
        for unit in self.units[count:]:
            need = Resident.num_bytes(unit, self._gradient_dtype(unit))
            if unit.index == 0:
                need -= unit.size * (self._host.units[0].image.itemsize + 4)  # all through a step it is there anyway
            if need > left:
                break
            left -= need
            count += 1
        if count > len(self._passes.residents) or not self._visiting:
            self.use_device(count, range(max(1, count), len(self.units)))
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def use_device(self, residents: int, visiting: Iterable[int] = ()) -> None:
        """Keep the first units on the device, and let others visit it to be stepped where the host is busy.

        Called with the gradients of a step on the host, or between steps.
        """
        visiting = set(visiting)
        if self._sharing.world > 1 and (residents or visiting):
            raise ConfigError("units stay on a device, or visit it, only where there is one rank")
        self._settle()
        kept = self._passes.residents
        for index in [index for index in kept if index >= residents]:
            del kept[index]
        if residents:
            self._loader.drop_edge()
            self._collector.drop_edge()
        own = self._gradients[self._sharing.local_rank]
        for unit in self.units[:residents]:
            if unit.index not in kept:
                resident = Resident(unit, self._host.units[unit.index], self.device, self._gradient_dtype(unit))
                resident.gradients.copy_(own.units[unit.index])
                kept[unit.index] = resident
        self._visiting = visiting
        for index in self._visiting:
            self._visitor.expect(self.units[index])

    def _give_residents_back(self) -> None:
        self._settle()
        self._passes.residents.clear()
        self._visiting.clear()

    def _settle(self) -> None:
        """Have everything on the host up to date."""
        self._optimizer.wait()
        self._visitor.wait()
        for unit in self.units:  # shares of other ranks too
            self._sharing.until_stepped(unit)
        for resident in self._passes.residents.values():
            resident.give_back()

    def _too_large(self, batch: DeviceBatch, rows: int, error: BaseException) -> TrainError:
        self._passes.forget()
        told = str(error).partition("\n")[0]
        return TrainError(
            f"{min(rows, len(batch))} sequences of {batch.input_ids.shape[1]} tokens at a time do not fit "
            f"{self.device} ({told}): compute a batch in more parts (--gradient-accumulation-steps), keep states "
            "between layers on the host (--offload-activations), or shorten sequences; the last commit is kept"
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything, by the names `Trainer` uses. Tensors are the trainer's own: copy what is to outlive a step."""
        self._require_whole()
        self._settle()
        tensors = self._states.tensors(self._steps)
        tensors["skips"] = torch.tensor([self._skips_in_a_row])
        tensors["rng.torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def load_state(self, tensors: State) -> None:
        self._give_way()
        self._end_loading(self._states.take([tensors], write=self._sharing.local_rank == 0))

    def begin(self, parts: Iterable[State] | None, first: First) -> None:
        """Become what rank 0 holds the state of: it writes for all ranks of its machine, straight where it belongs."""
        self._give_way()
        small: State = {}
        if self._sharing.hosts > 1:  # each machine has a copy: what is read once is sent to all
            small = self._states.take(parts_from_first(parts, first), write=self._sharing.local_rank == 0)
        else:

            def take() -> dict[str, Any]:
                small.update(self._states.take(parts or (), write=True))
                return {}

            first.from_first(take)
            small = first.state_from_first(small if first.is_first else None)
        self._end_loading(small)
        self.check_parity()

    def _give_way(self) -> None:
        self._give_residents_back()
        self._looks_left = _LOOKS
        self._torn = False
        self._loader.forget()

    def _end_loading(self, small: State) -> None:
        self._steps = self._states.take_small(small)
        self._skips_in_a_row = int(small["skips"]) if "skips" in small else 0
        torch.set_rng_state(small["rng.torch"])
        if self.device.type == "cuda" and "rng.cuda" in small:
            torch.cuda.set_rng_state(small["rng.cuda"], self.device)
        self._sharing.total(0.0)  # whoever goes on sees all of it

    def close(self, error: BaseException | None = None) -> None:
        """End the threads and let go of the device's hold on host memory."""
        sys.setswitchinterval(self._switch_s)
        if error is not None:
            self._sharing.fail(error)  # whoever waits for other ranks waits no longer
        self._loader.close()
        self._optimizer.close()
        self._visitor.close()
        if self.device.type == "cuda":
            with suppress(RuntimeError) if error is not None else nullcontext():  # a device that failed says so again
                torch.cuda.synchronize(self.device)
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            self._host.memory.close()
            for gradients in self._gradients:
                gradients.memory.close()
        self._sharing.close()


def budget_bytes(device: torch.device, gpu_budget_gib: float | None) -> int | None:
    """Memory of a device that may be used, without what CUDA takes for itself; None on the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    if gpu_budget_gib is None:
        return int(0.94 * free)
    if gpu_budget_gib * 2**30 > total:
        raise ConfigError(
            f"gpu_budget_gib={gpu_budget_gib:g} is more than the {total / 2**30:.0f} GiB of {device}: lower it"
        )
    ours = int(gpu_budget_gib * 2**30) - _CONTEXT_BYTES
    if ours <= 0:
        raise ConfigError(f"gpu_budget_gib={gpu_budget_gib:g} is less than CUDA needs for itself: raise it above 1")
    return ours

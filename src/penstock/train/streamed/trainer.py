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
import warnings
from collections.abc import Iterable
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
from penstock.train.streamed.decoder import Decoder
from penstock.train.streamed.due import StepOrder
from penstock.train.streamed.lanes import wait_on_host
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.parity import PARTS, Whole, require_parity, small_batch, unchanging
from penstock.train.streamed.placing import Placing, let_segments_grow
from penstock.train.streamed.sizes import parameters_at_work
from penstock.train.streamed.speeds import peak_flops
from penstock.train.streamed.states import HostStates, parts_from_first
from penstock.train.streamed.streaming import Streaming
from penstock.train.trainer import First, OnNan, Precision, State, StepResult, Together, Trainer

_SWITCH_S = 2e-4
"""How long a thread may keep others from Python: those that step and load have little to say, and must not wait long
behind the one that commands the device."""


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
        self._adam = adam or AdamSettings()
        self._schedule = schedule
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm
        self._precision: Precision = precision
        self._on_nan: OnNan = on_nan
        self._in_chunks = None
        self._skips_in_a_row = 0
        self._steps = 0
        self._torn = False
        """Whether a step has failed that had stepped some units already."""
        self._timings: dict[str, float] = {}
        ranks = ranks or Ranks()
        self._ranks = ranks
        let_segments_grow(self.device)
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")  # of torch
        self.streaming = streaming = Streaming(
            Decoder(model),
            adam=self._adam,
            device=self.device,
            bf16=precision == "bf16",
            parts=accumulation,
            offload_activations=offload_activations,
            ranks=ranks,
        )
        self._placing = Placing(streaming, gpu_budget_gib)
        self._states = HostStates(model.network, streaming.units, streaming.host)
        peak = peak_flops(self.device, precision)
        self._token_s = 6 * parameters_at_work(model.lm) / (peak * ranks.world) if peak else None
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)

    @property
    def units(self) -> list[Unit]:
        return self.streaming.units

    def use_device(self, residents: int, visiting: Iterable[int] = ()) -> None:
        """Say who stays on the device and who visits it, whatever the budget; see `Streaming.use_device`."""
        self.streaming.use_device(residents, visiting)

    # -- learning ------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | DeviceBatch, number: int, together: Together | None = None) -> StepResult:
        self._require_whole()
        began = time.perf_counter()
        streaming = self.streaming
        streaming.lanes.forget_times()
        fed = batch if isinstance(batch, DeviceBatch) else to_device(batch, self.device)
        rate = self._schedule.at(number)
        weight, tokens = float(fed.num_tokens), float(fed.num_tokens)
        if together is None and self._ranks.world > 1:
            together = self._ranks
        if together is not None:
            (weight,) = together.total([weight])
        rows = max(1, -(-len(fed) // self._accumulation))
        parts = [slice(start, start + rows) for start in range(0, len(fed), rows)]
        self._placing.make_room(fed, rows)
        streaming.step_order = None
        if self._steps_at_once:
            streaming.step_order = StepOrder(number=self._steps + 1, learning_rate=rate, scale=1.0)
            self._torn = True  # until all of them are
        busy, waited = (streaming.optimizer.busy_s, streaming.visitor.busy_s), streaming.loader.waited_s
        try:
            total = self._learn_all(fed, parts, max(1.0, weight))
            launched = time.perf_counter()
            found, norm = self._found(total)
        except torch.OutOfMemoryError as error:
            raise self._too_large(fed, rows, error) from error
        except BaseException:
            streaming.passes.forget()
            raise
        if together is not None:
            found, tokens = together.total([found, tokens])
        finite = math.isfinite(found) and math.isfinite(norm)
        if streaming.step_order is None:
            self._placing.use_what_is_left()
        if finite:
            self._apply(rate, norm)
            self._skips_in_a_row = 0
        else:
            self._refuse(fed, number, found, norm)
        self._torn = False
        if streaming.step_order is not None:  # units were stepped where they were
            self._placing.use_what_is_left()
        self._timings = {
            "step": time.perf_counter() - began,
            "launch": launched - began,
            "wait": streaming.loader.waited_s - waited,
            "optimizer": streaming.optimizer.busy_s - busy[0],
            "visits": streaming.visitor.busy_s - busy[1],
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
            return self.streaming.passes.learn(batch, parts, weight)
        except torch.OutOfMemoryError:
            if self.streaming.step_order is not None or not self.streaming.residents:
                raise
        self.streaming.passes.forget()
        self._placing.make_more_room()
        return self.streaming.passes.learn(batch, parts, weight)

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
        self.streaming.settle()
        self._ranks.from_first(self._compare_with_whole)

    def _compare_with_whole(self) -> dict[str, Any]:
        streaming, lm = self.streaming, self.streaming.decoder.lm
        fed, kind = small_batch(self.model, self.device), str(lm.config.model_type)
        streaming.looking = []
        try:
            with unchanging(lm, self.device):
                loss = float(streaming.passes.learn(fed, PARTS, float(fed.num_tokens)))
                for mark in streaming.looking:
                    wait_on_host(mark)
                whole = Whole(self.model, streaming.units, streaming.host)
                with whole.at_hand():
                    with streaming.fused.without():
                        found = whole.compared_with(streaming.gradients_of)
                    parts = whole.compared_with_parts(streaming.decoder) if self._precision != "fp32" else None
        finally:
            streaming.looking = None
            streaming.passes.forget()
        if not math.isfinite(whole.loss) and not math.isfinite(loss):
            return {}  # there is nothing to compare: the first step will say what is wrong
        decay = self._adam.weight_decay
        require_parity(kind, self._precision, loss, whole.loss, found, weight_decay=decay)
        if parts is not None:
            require_parity(kind, "fp32", parts[0], whole.loss, parts[1], weight_decay=decay)
        return {}

    def _found(self, total: Tensor) -> tuple[float, float]:
        """The loss and the norm of all gradients; the step's one wait for the device."""
        streaming = self.streaming
        if streaming.sharing.world == 1:
            found, squared = torch.stack([total, streaming.collector.norm_squared]).tolist()
        else:
            found, squared = total.item(), streaming.sharing.total(streaming.optimizer.norm_squared())
        self._forget_gradients()
        return found, math.sqrt(squared) if squared >= 0 else math.nan

    def _apply(self, rate: float, norm: float) -> None:
        self._steps += 1
        scale = min(1.0, self._max_grad_norm / (norm + 1e-6)) if self._max_grad_norm else 1.0
        self.streaming.step(StepOrder(number=self._steps, learning_rate=rate, scale=scale))

    def loss_sum(self, batch: DeviceBatch) -> Tensor:
        try:
            return self.streaming.passes.loss_sum(batch, slice(0, len(batch)))
        except BaseException:
            self.streaming.passes.forget()
            raise

    def timings(self) -> dict[str, float]:
        """Seconds by term of the last step; they overlap.

        Of the device: compute, link (the busier way, visits of the optimizer included). Of the host: optimizer, visits
        (how long the device's steps took), launch (commanding the device), of which wait is for weights to be stepped.
        """
        lanes = self.streaming.lanes.seconds()
        link = max(lanes["in"] + lanes["visit in"], lanes["out"] + lanes["visit out"])
        return {**self._timings, "compute": lanes["compute"], "link": link}

    def tensors_alike(self) -> Iterable[Tensor]:
        self.streaming.settle()
        return [unit.weights for unit in self.streaming.host.units]

    def _forget_gradients(self) -> None:
        self.streaming.collector.norm_squared.zero_()

    def _too_large(self, batch: DeviceBatch, rows: int, error: BaseException) -> TrainError:
        self.streaming.passes.forget()
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
        self.streaming.settle()
        tensors = self._states.tensors(self._steps)
        tensors["skips"] = torch.tensor([self._skips_in_a_row])
        tensors["rng.torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def load_state(self, tensors: State) -> None:
        self._give_way()
        self._end_loading(self._states.take([tensors], write=self.streaming.sharing.local_rank == 0))

    def begin(self, parts: Iterable[State] | None, first: First) -> None:
        """Become what rank 0 holds the state of: it writes for all ranks of its machine, straight where it belongs."""
        self._give_way()
        small: State = {}
        if self.streaming.sharing.hosts > 1:  # each machine has a copy: what is read once is sent to all
            small = self._states.take(parts_from_first(parts, first), write=self.streaming.sharing.local_rank == 0)
        else:

            def take() -> dict[str, Any]:
                small.update(self._states.take(parts or (), write=True))
                return {}

            first.from_first(take)
            small = first.state_from_first(small if first.is_first else None)
        self._end_loading(small)
        self.check_parity()

    def _give_way(self) -> None:
        self._placing.forget()
        self._torn = False
        self.streaming.loader.forget()

    def _end_loading(self, small: State) -> None:
        self._steps = self._states.take_small(small)
        self._skips_in_a_row = int(small["skips"]) if "skips" in small else 0
        torch.set_rng_state(small["rng.torch"])
        if self.device.type == "cuda" and "rng.cuda" in small:
            torch.cuda.set_rng_state(small["rng.cuda"], self.device)
        self.streaming.sharing.total(0.0)  # whoever goes on sees all of it

    def close(self, error: BaseException | None = None) -> None:
        """End the threads and let go of the device's hold on host memory."""
        sys.setswitchinterval(self._switch_s)
        self.streaming.close(error)
        self._placing.close()

"""A model in the host's memory, and all that moves it: what `trainer.py` commands.

HostState, HostGradients     what the host holds            Loader, Collector     to the device and back
HostAdam, VisitingAdam       who steps it                   Passes                who computes with it
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.train.optimizers import AdamSettings
from penstock.train.ranks import Ranks
from penstock.train.streamed.boundaries import Boundaries
from penstock.train.streamed.collecting import Collector
from penstock.train.streamed.decoder import Decoder
from penstock.train.streamed.due import Due, DueStep, StepOrder, parts_of
from penstock.train.streamed.fused import Fused
from penstock.train.streamed.host import HostGradients, HostState
from penstock.train.streamed.lanes import Lanes, Mark
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.loading import Loader
from penstock.train.streamed.passes import Passes
from penstock.train.streamed.resident import Resident
from penstock.train.streamed.sharing import Sharing
from penstock.train.streamed.stepping import HostAdam
from penstock.train.streamed.visiting import VisitingAdam

SLOTS = 3
"""Layers on the device at a time, of those that come and go."""


class Streaming:
    """One rank's part of it. All ranks make, and close, theirs at the same time."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        adam: AdamSettings,
        device: torch.device,
        bf16: bool,
        parts: int,
        offload_activations: bool,
        ranks: Ranks,
    ) -> None:
        """Take a model over: its weights move into memory laid out for streaming, a layer at a time.

        Args:
            decoder: The model.
            adam: The optimizer's settings.
            device: Where it is computed.
            bf16: Whether it is computed in bf16.
            parts: That a batch is computed in.
            offload_activations: Keep states between layers on the host.
            ranks: All ranks of the job.
        """
        self.decoder = decoder
        self.fused = Fused(decoder.lm.base_model)
        self.device = device
        self._adam = adam
        self._at_once = parts == 1
        self._bf16 = bf16
        self.units = decoder.units(ranks.local_world)
        self.lanes = Lanes(device)
        self.sharing = Sharing(ranks, len(self.units))
        self.step_order: StepOrder | None = None
        """How to step units as soon as their gradients are there; None where that has to wait for all gradients."""
        self.looking: list[Mark] | None = None
        """Where the marks of gradients go that are only looked at."""
        self._due = Due()
        self._arrived: dict[int, Mark] = {}
        self.visiting: set[int] = set()
        self._open(offload_activations)

    def _open(self, offload_activations: bool) -> None:
        pinned, image = self.device.type == "cuda", torch.bfloat16 if self._bf16 else torch.float32
        size = HostState.num_bytes(self.units, image)
        self.host = HostState(self.units, image_dtype=image, file=self.sharing.shared_file(size), pinned=pinned)
        self._take_weights()
        files = self.sharing.files_of_all(HostGradients.num_bytes(self.units, self.gradient_dtype))
        self.gradients = [
            HostGradients(self.units, self.gradient_dtype, file=file, pinned=pinned and rank == self.sharing.local_rank)
            for rank, file in enumerate(files)
        ]
        self.optimizer = HostAdam(self.units, self.host, self.gradients, self.sharing, self._adam)
        self.visitor = VisitingAdam(self.host, self.own_gradients, self.sharing, self._adam, self.lanes)
        largest = max(unit.size for unit in self.units[1:])
        until = self.sharing.until_stepped
        self.loader = Loader(self.units, self.host, self.lanes, until, slots=SLOTS, size=largest)
        self.collector = Collector(self.units, self.own_gradients, self.lanes, slots=2)
        self.passes = Passes(
            self.decoder,
            self.units,
            self.loader,
            self.collector,
            Boundaries(self.lanes, on_host=offload_activations),
            self.lanes,
            measured=self.sharing.world == 1,
            on_gradients=self._on_gradients,
        )
        if self.device.type == "cuda":
            self.fused.on()
        for owner in self.decoder.lm.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(self.device))

    @property
    def own_gradients(self) -> HostGradients:
        return self.gradients[self.sharing.local_rank]

    @property
    def residents(self) -> dict[int, Resident]:
        """Units that stay on the device, by their numbers."""
        return self.passes.residents

    def gradient_dtype(self, unit: Unit) -> torch.dtype:
        """What gradients of a unit are sent in: wider than they are made, where they are made in parts."""
        return torch.bfloat16 if self._bf16 and self._at_once and unit.index > 0 else torch.float32

    def gradients_of(self, unit: Unit) -> Tensor:
        """Those this rank made last."""
        resident = self.residents.get(unit.index)
        return self.own_gradients.units[unit.index] if resident is None else resident.room()

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Move the model's weights over, and let go of them where they were."""
        for unit, host in zip(self.units, self.host.units, strict=True):
            for place in unit.places:
                if self.sharing.local_rank == 0:
                    place.of(host.weights).copy_(place.parameter)
                place.parameter.data = place.of(host.weights)
        if self.sharing.local_rank == 0:
            self.host.make_images()
        self.sharing.total(0.0)  # whoever goes on sees all weights

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _on_gradients(self, unit: Unit, arrived: Mark) -> None:
        if self.looking is not None:
            self.looking.append(arrived)
            return
        self._arrived[unit.index] = arrived
        self.optimizer.take(unit, arrived)
        if self.step_order is not None:
            self._make_due([unit], self.step_order)

    def step(self, order: StepOrder) -> None:
        """Step everything that was not stepped as its gradients came."""
        if self.step_order is None:
            self._make_due([unit for unit in self.units if unit.index not in self.residents], order)
        for resident in self.residents.values():
            resident.step(order, self._adam)

    def _make_due(self, units: list[Unit], order: StepOrder) -> None:
        """Have units stepped, in this order, by whoever is free first."""
        count = 0
        for unit in units:
            parts = parts_of(self.sharing.share(unit))
            count += len(parts)
            self.sharing.will_step(unit, len(parts))
            arrived, may_visit = self._arrived.get(unit.index), unit.index in self.visiting
            for part in parts:
                self._due.put(DueStep(unit=unit, part=part, order=order, arrived=arrived, may_visit=may_visit))
        self.optimizer.help_with(self._due, count)
        if self.visiting:
            self.visitor.help_with(self._due)

    def settle(self) -> None:
        """Have everything on the host up to date."""
        self.optimizer.wait()
        self.visitor.wait()
        for unit in self.units:  # shares of other ranks too
            self.sharing.until_stepped(unit)
        for resident in self.residents.values():
            resident.give_back()

    # -- who is where --------------------------------------------------------------------------------------------------

    def use_device(self, residents: int, visiting: Iterable[int] = ()) -> None:
        """Keep the first units on the device, and let others visit it to be stepped where the host is busy.

        Called with the gradients of a step on the host, or between steps.
        """
        visiting = set(visiting)
        if self.sharing.world > 1 and (residents or visiting):
            raise ConfigError("units stay on a device, or visit it, only where there is one rank")
        self.settle()
        for index in [index for index in self.residents if index >= residents]:
            del self.residents[index]
        if residents:
            self.loader.drop_edge()
            self.collector.drop_edge()
        for unit in self.units[:residents]:
            if unit.index not in self.residents:
                resident = Resident(unit, self.host.units[unit.index], self.device, self.gradient_dtype(unit))
                resident.room().copy_(self.own_gradients.units[unit.index])
                self.residents[unit.index] = resident
        self.visiting = visiting
        for index in visiting:
            self.visitor.expect(self.units[index])

    def give_residents_back(self) -> None:
        """The device holds nothing for good."""
        self.settle()
        self.residents.clear()
        self.visiting.clear()

    def close(self, error: BaseException | None = None) -> None:
        """End the threads and let go of the device's hold on host memory."""
        if error is not None:
            self.sharing.fail(error)  # whoever waits for other ranks waits no longer
        self.fused.off()
        self.loader.close()
        self.optimizer.close()
        self.visitor.close()
        if self.device.type == "cuda":
            with suppress(RuntimeError) if error is not None else nullcontext():  # a device that failed says so again
                torch.cuda.synchronize(self.device)
            self.host.memory.close()
            for gradients in self.gradients:
                gradients.memory.close()
        self.sharing.close()

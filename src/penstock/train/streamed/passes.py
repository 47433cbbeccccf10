"""A forward and a backward pass over units that come and go.

    forward    edge ─ layer 0 ─ 1 ─ ... ─ last    states before each layer are kept; nothing else is
    head       tiles of tokens: logits, loss and gradient at once, nothing kept
    backward   last ─ ... ─ 1 ─ layer 0 ─ edge    each layer computes its part again, then goes back through it

Every unit is on the device twice a step, and a unit that is there learns all parts of the batch before it leaves: parts
cost no more loads, and their gradients are added up in fp32 where they are made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.train.device_batch import DeviceBatch
from penstock.train.long.cross_entropy import loss_and_gradient
from penstock.train.long.dice import Dice
from penstock.train.streamed.boundaries import Boundaries
from penstock.train.streamed.collecting import Collector
from penstock.train.streamed.decoder import Before, Decoder
from penstock.train.streamed.lanes import Lanes, Mark
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.loading import Loader
from penstock.train.streamed.resident import Resident

LOGITS_BYTES = 768 << 20
"""As many logits are made at a time as fit, in fp32."""


class Passes:
    """Learns batches with a model that is only partly on the device."""

    def __init__(
        self,
        decoder: Decoder,
        units: list[Unit],
        loader: Loader,
        collector: Collector,
        boundaries: Boundaries,
        lanes: Lanes,
        *,
        measured: bool,
        on_gradients: Callable[[Unit, Mark], None],
    ) -> None:
        """Remember what takes part.

        Args:
            decoder: The model.
            units: Its units; layer i is unit i + 1.
            loader: Brings them.
            collector: Takes their gradients.
            boundaries: Keep the states between layers.
            lanes: Of the device.
            measured: Whether the norm of gradients is taken on the device.
            on_gradients: Called with every unit whose gradients are on their way to the host, the last layer's first.
        """
        self._decoder = decoder
        self._units = units
        self._loader = loader
        self._collector = collector
        self._boundaries = boundaries
        self._lanes = lanes
        self._measured = measured
        self._on_gradients = on_gradients
        self.residents: dict[int, Resident] = {}
        self._dice_before = Dice(lanes.device)
        self._dice: list[Dice] = []
        """Of each layer: some draw random numbers where others do not."""

    @property
    def _streamed(self) -> list[int]:
        """Layers' units that are loaded, in their order."""
        return [unit.index for unit in self._units[1:] if unit.index not in self.residents]

    def learn(self, batch: DeviceBatch, parts: list[slice], weight: float) -> Tensor:
        """Make the gradients of a batch's summed loss over `weight`; returns that loss."""
        for resident in self.residents.values():
            resident.let_go()
        self._expect(backward=True)
        self._bind(0)
        self._collector.begin(self._units[0], self._own_gradients(0))
        states, befores = self._forward(batch, parts, kept=True)
        total = torch.zeros((), dtype=torch.float64, device=self._lanes.device)
        errors: list[Tensor] = []
        for part, rows in enumerate(parts):
            with self._lanes.timed("compute"):
                loss, error = self._head(states[part], batch, rows, weight)
            total += loss
            errors.append(error)
        self._backward(errors, befores)
        for part, rows in enumerate(parts):
            with self._dice_before.as_noted(part), torch.enable_grad():
                first = self._decoder.before(batch, rows).states
            if first.requires_grad:
                torch.autograd.backward(first, errors[part])
            self._collector.add(self._units[0])
        self._end(self._units[0])
        return total

    @torch.no_grad()
    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        """The summed loss of some sequences; nothing is learned."""
        total = torch.zeros((), dtype=torch.float64, device=self._lanes.device)
        if not len(batch.input_ids[rows]):
            return total
        self._expect(backward=False)
        self._bind(0)
        states, _ = self._forward(batch, [rows], kept=False)
        hidden, labels = self._decoder.behind(states[0], batch, rows).flatten(0, 1), batch.labels[rows].flatten()
        for tile in self._tiles(len(hidden)):
            loss, _ = loss_and_gradient(self._decoder.head(hidden[tile][None]), labels[tile][None], 1.0)
            total += loss
        self._release(0)
        return total

    def forget(self) -> None:
        """Whatever was under way failed: nothing of it stays."""
        self._loader.forget()
        self._collector.forget()
        self._boundaries.forget()
        for unit in self._units:
            for place in unit.places:
                place.parameter.grad = None

    # -- passes --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _forward(self, batch: DeviceBatch, parts: list[slice], *, kept: bool) -> tuple[list[Tensor], list[Before]]:
        self._dice_before = Dice(self._lanes.device)
        self._dice = [Dice(self._lanes.device) for _ in self._decoder.layers]
        befores: list[Before] = []
        for part, rows in enumerate(parts):
            with self._dice_before.noted(part):
                befores.append(self._decoder.before(batch, rows))
        states = [before.states for before in befores]
        stays = set(self._streamed[-self._loader.slots + 1 :]) if kept else set[int]()
        for layer in range(len(self._decoder.layers)):
            self._bind(layer + 1)
            for part, before in enumerate(befores):
                if kept:
                    self._boundaries.keep(layer, part, states[part])
                with self._lanes.timed("compute"), self._dice[layer].noted(part):
                    states[part] = self._decoder.layer(layer, states[part], before.calls[layer])
            if layer + 1 not in stays:  # the last ones are the first to be wanted again
                self._release(layer + 1)
        return states, befores

    def _head(self, states: Tensor, batch: DeviceBatch, rows: slice, weight: float) -> tuple[Tensor, Tensor]:
        """The loss of a part, and its gradient by the last layer's states."""
        edge = self._units[0]
        last = states.detach().requires_grad_()
        with torch.enable_grad():
            hidden = self._decoder.behind(last, batch, rows)
        flat, labels = hidden.detach().flatten(0, 1), batch.labels[rows].flatten()
        of_hidden = torch.empty_like(flat)
        total = torch.zeros((), dtype=torch.float64, device=self._lanes.device)
        for tile in self._tiles(len(flat)):
            some = flat[tile][None].requires_grad_()
            with torch.enable_grad():
                logits = self._decoder.head(some)
            loss, error = loss_and_gradient(logits.detach(), labels[tile][None], weight)
            torch.autograd.backward(logits, error)
            del logits, error
            assert some.grad is not None
            of_hidden[tile] = some.grad[0]
            total += loss
            self._collector.add(edge)
        torch.autograd.backward(hidden, of_hidden.view_as(hidden))
        self._collector.add(edge)
        assert last.grad is not None
        return total, last.grad

    def _backward(self, errors: list[Tensor], befores: list[Before]) -> None:
        self._boundaries.expect(len(self._decoder.layers) - 1)
        for layer in reversed(range(len(self._decoder.layers))):
            unit = self._units[layer + 1]
            self._bind(unit.index)
            self._collector.begin(unit, self._own_gradients(unit.index))
            self._boundaries.expect(layer - 1)
            with self._lanes.timed("compute"):
                for part, before in enumerate(befores):
                    errors[part] = self._layer_back(layer, part, errors[part], before)
            self._end(unit)

    def _layer_back(self, layer: int, part: int, error: Tensor, before: Before) -> Tensor:
        """Compute a layer again and go back through it; returns the gradient by the states before it."""
        states = self._boundaries.take(layer, part).detach().requires_grad_()
        with self._dice[layer].as_noted(part), torch.enable_grad():
            after = self._decoder.layer(layer, states, before.calls[layer])
        torch.autograd.backward(after, error)
        assert states.grad is not None
        self._collector.add(self._units[layer + 1])
        return states.grad

    def _end(self, unit: Unit) -> None:
        self._release(unit.index)
        resident = unit.index in self.residents
        mark = self._collector.end(unit, measured=self._measured)
        if not resident:
            self._on_gradients(unit, mark)

    # -- units ---------------------------------------------------------------------------------------------------------

    def _expect(self, *, backward: bool) -> None:
        streamed = self._streamed
        edge = [] if 0 in self.residents else [0]
        self._loader.expect(edge + streamed)
        if backward:
            self._loader.expect(streamed[: max(0, len(streamed) - self._loader.slots + 1)][::-1])

    def _bind(self, index: int) -> None:
        resident = self.residents.get(index)
        flat = resident.image if resident is not None else self._loader.get(index)
        for place in self._units[index].places:
            place.parameter.data = place.of(flat)

    def _release(self, index: int) -> None:
        if index not in self.residents:
            self._loader.release(index)

    def _own_gradients(self, index: int) -> Tensor | None:
        resident = self.residents.get(index)
        return resident.room() if resident is not None else None

    def _tiles(self, tokens: int) -> list[slice]:
        vocabulary = self._decoder.lm.config.get_text_config().vocab_size
        size = max(1, LOGITS_BYTES // (4 * vocabulary))
        size = -(-tokens // -(-tokens // size)) if tokens else 1  # all about the same
        return [slice(start, start + size) for start in range(0, tokens, size)]

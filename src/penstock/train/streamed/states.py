"""The state of a streamed model, by the names every trainer uses: handed out as it lies, and taken in part by part.

    state ──► views of host memory                       taking: parts of a state ──► written where they belong
                                                                 what is left, small, goes to every rank

Nothing here holds a second copy of weights or moments: the largest states fit the machine once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.train.streamed.host import HostState
from penstock.train.streamed.layout import Place, Unit
from penstock.train.trainer import First, State

_STEP = "optimizer.0.step"


class HostStates:
    """Names for what the host holds of a model."""

    def __init__(self, network: nn.Module, units: list[Unit], host: HostState) -> None:
        self._network = network
        self._host = host
        self._places = {place.name: (unit, place) for unit in units for place in unit.places}

    def tensors(self, steps: int) -> State:
        """All weights, buffers and moments, as they lie; without moments before the first step, as optimizers do."""
        found: State = {}
        for name, (unit, place) in self._places.items():
            found[f"model.{name}"] = place.of(self._host.units[unit.index].weights)
        for name, buffer in self._buffers():
            found[f"model.{name}"] = buffer.detach().cpu()
        if steps:
            for index, name in enumerate(self._in_optimizer_order()):
                unit, place = self._places[name]
                found[f"optimizer.{index}.step"] = torch.tensor(float(steps))
                found[f"optimizer.{index}.exp_avg"] = place.of(self._host.units[unit.index].mean)
                found[f"optimizer.{index}.exp_avg_sq"] = place.of(self._host.units[unit.index].square)
        return found

    @torch.no_grad()
    def take(self, parts: Iterable[State], *, write: bool) -> State:
        """Take a state over; returns what is small and not on the host: buffers, counters, random numbers.

        Args:
            parts: Of the state; let go of one after another.
            write: Whether this rank writes for its machine.
        """
        targets = self._targets()
        buffers = {f"model.{name}": buffer.shape for name, buffer in self._buffers()}
        small: State = {}
        seen: set[str] = set()
        wrong: list[str] = []

        def take(name: str, tensor: Tensor) -> None:
            seen.add(name)
            if name in targets:
                array, place = targets[name]
                if place.parameter.shape != tensor.shape:
                    wrong.append(name)
                elif write:
                    place.of(array).copy_(tensor)
            elif name == _STEP or not name.startswith(("model.", "optimizer.")) or name in buffers:
                small[name] = tensor.clone()  # of its own: not the whole file it came with
                if buffers.get(name, tensor.shape) != tensor.shape:
                    wrong.append(name)
            elif not name.endswith(".step"):
                wrong.append(name)

        for part in parts:
            for name in part:
                take(name, part[name])
        needed = {name for name in targets if name.startswith("model.")} | buffers.keys()
        wrong.extend(sorted(needed - seen))
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {', '.join(wrong[:3])} {'and more ' * (len(wrong) > 3)}"
                "missing, unknown or of another shape"
            )
        if write:
            for name in targets.keys() - seen:  # moments, of a state before the first step
                array, place = targets[name]
                place.of(array).zero_()
            self._host.make_images()
        return small

    @torch.no_grad()
    def take_small(self, small: State) -> int:
        """Take buffers over from what `take` returned; returns the steps made."""
        for name, buffer in self._buffers():
            buffer.copy_(small[f"model.{name}"])
        return int(small[_STEP]) if _STEP in small else 0

    def _targets(self) -> dict[str, tuple[Tensor, Place]]:
        """Where each tensor of a state belongs."""
        targets: dict[str, tuple[Tensor, Place]] = {}
        for name, (unit, place) in self._places.items():
            targets[f"model.{name}"] = self._host.units[unit.index].weights, place
        for index, name in enumerate(self._in_optimizer_order()):
            unit, place = self._places[name]
            targets[f"optimizer.{index}.exp_avg"] = self._host.units[unit.index].mean, place
            targets[f"optimizer.{index}.exp_avg_sq"] = self._host.units[unit.index].square, place
        return targets

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that a checkpoint of the model holds."""
        parameters = {name for name, _ in self._network.named_parameters(remove_duplicate=False)}
        state: dict[str, Any] = self._network.state_dict()
        return [(name, tensor) for name, tensor in state.items() if name not in parameters]

    def _in_optimizer_order(self) -> list[str]:
        """Parameters as torch's optimizer numbers them: matrices first, in the model's order."""
        named = [(name, p) for name, p in self._network.named_parameters() if p.requires_grad]
        return [name for name, p in named if p.ndim >= 2] + [name for name, p in named if p.ndim < 2]


def parts_from_first(parts: Iterable[State] | None, first: First) -> Iterator[State]:
    """The parts that rank 0 has, on every rank, one at a time."""
    waiting = iter(parts or ())
    while True:
        held: list[State] = []

        def following(held: list[State] = held) -> dict[str, Any]:
            held.extend(part for part in [next(waiting, None)] if part is not None)
            return {"more": bool(held)}

        if not first.from_first(following)["more"]:
            return
        yield first.state_from_first(held[0] if held else None)

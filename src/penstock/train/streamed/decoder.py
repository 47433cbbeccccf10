"""A decoder of `transformers` taken apart: what is before its layers, each layer, what is behind them.

    before(tokens) ──► states, and what each layer is called with (masks, rotations, positions)
    layer(i, states, call) ──► states
    behind(states) ──► states as the head takes them        head(some of them) ──► logits

Nothing of a model is written again here. Its own forward pass runs, with stand-ins in its layers' place that take down
what they are called with; so masks by kind of layer, rotations, soft caps and scales are the model's own. What cannot
be taken apart like this (layers that hand each other more than states) shows when the model is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.train.device_batch import DeviceBatch
from penstock.train.models.huggingface import CausalLM
from penstock.train.streamed.layout import Unit, lay_out


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer is called with beside the states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is known before the first layer."""

    states: Tensor
    calls: list[Call]


class Decoder:
    """A causal language model whose layers can be run one at a time."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.lm: Any = model.lm
        self.layers = find_layers(model.lm)
        self._returns_tuple = [False] * len(self.layers)
        self._trunk: nn.Module = self.lm.base_model
        """What the model calls for the states its head takes."""
        self._output: Any = None
        """Makes of states what the trunk returns."""
        self._try_out()

    def units(self, world: int) -> list[Unit]:
        """The edge first, then the layers in their order."""
        of_layers = {id(parameter) for layer in self.layers for parameter in layer.parameters()}
        names: dict[int, str] = {}
        for name, parameter in self.lm.named_parameters():
            names[id(parameter)] = name
        edge = [(name, p) for name, p in self.lm.named_parameters() if id(p) not in of_layers]
        units = [lay_out(0, "edge", edge, world)]
        for number, layer in enumerate(self.layers):
            own = [(names[id(parameter)], parameter) for parameter in layer.parameters()]
            units.append(lay_out(number + 1, f"layer {number}", own, world))
        if sum(len(unit.places) for unit in units) != len(names):
            raise self._refusal("layers share weights")
        return units

    @property
    def _kind(self) -> str:
        return str(self.lm.config.model_type)

    def before(self, batch: DeviceBatch, rows: slice) -> Before:
        """Everything up to the first layer."""
        calls: list[Call | None] = [None] * len(self.layers)
        states: list[Tensor] = []

        def note(number: int, first: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[number] = Call(args, kwargs)
            states.append(first)
            return self._returned(number, first)

        with self._in_place_of_layers(note):
            self._base(batch, rows)
        return Before(states=states[0], calls=self._all_called(calls))

    def _all_called(self, calls: list[Call | None]) -> list[Call]:
        found = [call for call in calls if call is not None]
        if len(found) < len(calls):
            raise self._refusal(f"layer {calls.index(None)} was not called")
        if torch.is_grad_enabled() and any(_learns(call) for call in found):
            raise self._refusal("its layers are handed more than states that is learned")
        return found

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self._kind} cannot be streamed, {why}: leave --streamed away")

    def layer(self, number: int, states: Tensor, call: Call) -> Tensor:
        """One layer."""
        out = self.layers[number](states, *call.args, **call.kwargs)
        return out[0] if self._returns_tuple[number] else out

    def behind(self, states: Tensor, batch: DeviceBatch, rows: slice) -> Tensor:
        """From the last layer to the head: most often a norm."""
        last = len(self.layers) - 1

        def stand_in(number: int, first: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._returned(number, states if number == last else first.detach())

        with self._in_place_of_layers(stand_in):
            return self._base(batch, rows)

    def head(self, states: Tensor) -> Tensor:
        """Logits of some states ``(1, tokens, width)``, with all the model does to them."""
        self._trunk.forward = lambda *_, **__: self._output(states)
        try:
            ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
            return self.lm(input_ids=ids, **self._model.options).logits
        finally:
            del self._trunk.forward

    def _base(self, batch: DeviceBatch, rows: slice) -> Tensor:
        """The model without its head, on some sequences."""
        ids = batch.input_ids[rows]
        if _is_one_document_each(batch, rows):  # needs no mask, and has a faster kernel
            return self.lm.base_model(input_ids=ids, **self._model.options)[0]
        options = self._model.options_for(batch.position_ids[rows], batch.document_ids[rows])
        return self.lm.base_model(input_ids=ids, **options)[0]

    def _returned(self, number: int, states: Tensor) -> Any:
        return (states,) if self._returns_tuple[number] else states

    @contextmanager
    def _in_place_of_layers(self, act: Callable[..., Any]) -> Iterator[None]:
        try:
            for number, layer in enumerate(self.layers):
                layer.forward = partial(_with_states_first, act, number)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _try_out(self) -> None:
        """See, on one token, how the model and its layers are called and what they return."""
        ids = torch.zeros((1, 1), dtype=torch.long, device=next(self.lm.parameters()).device)
        trunks: list[nn.Module] = []
        inside = {module for layer in self.layers for module in layer.modules()}
        around = [module for module in self.lm.base_model.modules() if module not in inside]

        def look(number: int, _: nn.Module, __: Any, output: Any) -> None:
            self._returns_tuple[number] = isinstance(output, tuple)

        def meet(module: nn.Module, _: Any) -> None:
            if any(own is self.layers[0] for own in module.modules()):
                trunks.append(module)

        def keep(module: nn.Module, _: Any, output: Any) -> None:
            if trunks and module is trunks[0]:
                self._output = (lambda states: (states,)) if isinstance(output, tuple) else _maker(type(output))

        hooks = [layer.register_forward_hook(partial(look, number)) for number, layer in enumerate(self.layers)]
        hooks += [module.register_forward_pre_hook(meet) for module in around]
        hooks += [module.register_forward_hook(keep) for module in around]
        try:
            with torch.no_grad(), torch.random.fork_rng([]):  # a run draws what it would have drawn
                self.lm(input_ids=ids, **self._model.options)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise self._refusal(f"one token is too much for it ({error})") from error
        finally:
            for hook in hooks:
                hook.remove()
        if not trunks:
            raise self._refusal("its layers are not called by a model of their own")
        self._trunk = trunks[0]
        calls: list[Call | None] = [None] * len(self.layers)

        def note(number: int, states: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[number] = Call(args, kwargs)
            return self._returned(number, states)

        with self._in_place_of_layers(note), torch.enable_grad(), torch.random.fork_rng([]):
            self.lm.base_model(input_ids=ids, **self._model.options)
        self._all_called(calls)


def _maker(kind: Any) -> Callable[[Tensor], Any]:
    return lambda states: kind(last_hidden_state=states)


def _with_states_first(act: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    if not args:
        args = (kwargs.pop("hidden_states"),)
    return act(number, *args, **kwargs)


def find_layers(lm: Any) -> list[nn.Module]:
    """The layers of a model, in their order."""
    wanted = getattr(lm.config.get_text_config(), "num_hidden_layers", None)
    lists = [
        module for module in lm.base_model.modules() if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if not lists:
        raise ConfigError(
            f"{lm.config.model_type} has no list of its {wanted} layers and cannot be streamed: leave --streamed away"
        )
    largest = max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters()))
    return list(largest)


def _is_one_document_each(batch: DeviceBatch, rows: slice) -> bool:
    """Asked of the arrays on the host: the device is not waited for."""
    documents = batch.source.document_ids[rows]
    return bool((documents == documents[:, :1]).all())


def _learns(call: Call) -> bool:
    return any(_requires_grad(value) for value in (*call.args, *call.kwargs.values()))


def _requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, list | tuple):
        return any(_requires_grad(each) for each in value)  # pyright: ignore[reportUnknownVariableType]
    return False

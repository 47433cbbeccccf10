"""Norms and gates of a model in fewer kernels, and with less kept for the way back.

    norm    x * weight / rms(x)      torch's own kernel instead of some seven, and no fp32 copies of states
    gate    silu(gate) * up          kept for the way back: gate and up, which the gradients are written over

Only modules that compute just that take part: one of each kind is tried out, and kinds that do something else stay as
they are. Their weights, names and places in the model stay theirs too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_TOKENS = 3
_TOLERANCE = 1e-5
_SETTINGS = (bool, int, float, str, list, tuple)


class Fused:
    """The modules of one model that are computed so, while it is on."""

    def __init__(self, model: nn.Module) -> None:
        """Find them, and try them out with the weights they have.

        Args:
            model: In fp32.
        """
        self._forwards: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        tried: dict[str, bool] = {}
        for module in model.modules():
            for find, compute_alike in ((_norm, _norms_alike), (_mlp, _mlps_alike)):
                if (forward := find(module)) is not None:
                    kind = _kind(module)
                    if kind not in tried:
                        tried[kind] = compute_alike(module)
                    if tried[kind]:
                        self._forwards.append((module, forward))

    def __len__(self) -> int:
        return len(self._forwards)

    def on(self) -> None:
        for module, forward in self._forwards:
            module.forward = partial(_called, module, forward)

    def off(self) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)

    @contextmanager
    def without(self) -> Iterator[None]:
        """While inside, the model computes as it does by itself."""
        were_on = any("forward" in module.__dict__ for module, _ in self._forwards)
        self.off()
        try:
            yield
        finally:
            if were_on:
                self.on()


def _kind(module: nn.Module) -> str:
    """What modules that compute alike have in common: everything but the numbers they have learned."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, _SETTINGS)}
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    parts = {name: type(part) for name, part in module.named_modules()}
    return repr((settings, shapes, parts))


def _called(module: nn.Module, forward: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    """With states alone, as it was tried out; what is called with more computes as it does by itself."""
    return forward(args[0]) if len(args) == 1 and not kwargs else type(module).forward(module, *args, **kwargs)


# -- norms -------------------------------------------------------------------------------------------------------------


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    names = [name for name, _ in module.named_parameters()]
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or names != ["weight"] or not isinstance(epsilon, float):
        return None
    return partial(_normed, module, epsilon)


def _norms_alike(module: nn.Module) -> bool:
    twin: Any = copy.deepcopy(module)
    some = _random(twin.weight, _TOKENS + 1, *twin.weight.shape)
    twin.weight.data = some[0]  # weights of 1 would hide what is done with them
    fused = _norm(twin)
    return fused is not None and _alike(twin, fused, some[1:])


def _normed(module: Any, epsilon: float, states: Tensor) -> Tensor:
    weight = module.weight
    if states.dtype != weight.dtype:
        return type(module).forward(module, states)
    return functional.rms_norm(states, weight.shape, weight, epsilon)


# -- gates -------------------------------------------------------------------------------------------------------------


def _mlp(module: Any) -> Callable[[Tensor], Tensor] | None:
    linear = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(each, nn.Linear) for each in linear) or not hasattr(module, "act_fn"):
        return None
    return partial(_gated, module)


def _mlps_alike(module: Any) -> bool:
    weight: Tensor = module.gate_proj.weight
    if not _alike(module.act_fn, functional.silu, _random(weight, 100)):
        return False
    return _alike(module, partial(_gated, module), _random(weight, 1, _TOKENS, weight.shape[1]))


def _gated(module: Any, states: Tensor) -> Tensor:
    return module.down_proj(_Gate.apply(module.gate_proj(states), module.up_proj(states)))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        (grad,), (gate, up) = grad_outputs, ctx.saved_tensors
        of_up = functional.silu(gate).mul_(grad)
        of_gate = grad.mul_(up) if grad.is_contiguous() else grad * up  # nobody else has it
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up


def _random(like: Tensor, *shape: int) -> Tensor:
    """Of its own generator: a run draws what it would have drawn."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(like)


@torch.no_grad()
def _alike(own: Callable[[Tensor], Any], other: Callable[[Tensor], Tensor], states: Tensor) -> bool:
    try:
        expected, got = own(states), other(states)
    except (RuntimeError, TypeError):  # called with more than states
        return False
    if not isinstance(expected, Tensor) or expected.shape != got.shape:
        return False
    largest = float(expected.abs().max())
    return largest > 0 and float((expected - got).abs().max()) <= _TOLERANCE * largest

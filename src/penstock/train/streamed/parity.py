"""Whether a model that was taken apart still computes what it is: tried on a few tokens, before anything is learned.

    the passes of training, on the device        ──► loss and gradients, in host memory
    the whole model, in fp32 on the CPU          ──► loss, and gradients one parameter at a time, compared and let go
    a run in bf16: the model taken apart in fp32 ──► the same, on samples of gradients: what bf16 would round away

The whole model computes with the host's own fp32 weights, so there is no second copy of them, and no gradient outlives
its comparison. Sequences hold several documents, padding, and one document alone: all ways attention is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import TrainError
from penstock.feed import IGNORED_LABEL, Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.long.cross_entropy import loss_and_gradient
from penstock.train.long.dice import random_state, replayed
from penstock.train.models.huggingface import CausalLM
from penstock.train.streamed.decoder import Decoder
from penstock.train.streamed.host import HostState
from penstock.train.streamed.layout import Place, Unit
from penstock.train.trainer import Precision

_LENGTH = 16
_SAMPLES = 4096
PARTS = [slice(0, 2), slice(2, 3)]
"""Of the batch: sequences that need a mask for their documents, and one that does not."""

_OF_LOSS: dict[Precision, float] = {"fp32": 1e-5, "bf16": 2e-2}
_OF_PARAMETER: dict[Precision, float] = {"fp32": 1e-4, "bf16": 0.25}
"""How far a gradient may be from the reference, of its norm. Rounding is far below; what is wrong is about 1."""
_WITH_EXPERTS = 0.75
"""The same in bf16 where tokens choose experts: rounding sends some to others."""
_AT_LEAST: dict[Precision, float] = {"fp32": 1e-3, "bf16": 0.2}
"""Gradients smaller than this part of all gradients (in bf16: of their unit's) count as this large: some are rounding
and nothing else, as those of keys' biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One parameter's gradient beside the reference's."""

    name: str
    unit: int
    decays: bool
    expected: float
    """The norm of the reference; 0 also where it has no gradient."""
    got: float
    differs: float
    """The norm of the difference."""
    unused: bool = False
    """The reference has no gradient at all."""


def small_batch(model: CausalLM, device: torch.device) -> DeviceBatch:
    """Two documents in a sequence, one with padding behind it, and one alone; the same tokens every time."""
    lm: Any = model.lm
    length = min(_LENGTH, getattr(lm.config.get_text_config(), "max_position_embeddings", None) or _LENGTH)
    cut, short = max(1, 7 * length // 16), max(2, 5 * length // 16)
    documents = np.zeros((3, length), np.int64)
    documents[0, cut:] = 1
    documents[1, short:] = -1
    ids = np.random.default_rng(0).integers(0, lm.get_input_embeddings().num_embeddings, documents.shape)
    positions = np.tile(np.arange(length), (3, 1))
    positions[0, cut:] -= cut
    positions[1, short:] -= short
    labels = np.full_like(ids, IGNORED_LABEL)
    follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    labels[:, :-1] = np.where(follows, ids[:, 1:], IGNORED_LABEL)
    made = Batch(
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        document_ids=documents,
        sample_ids=np.zeros(0, np.int64),
        spans=np.zeros((0, 3), np.int64),
        start_offset=0,
        stop_offset=3,
        samples_done=0,
    )
    return to_device(made, device)


@contextmanager
def unchanging(lm: nn.Module, device: torch.device) -> Iterator[None]:
    """While inside, a model computes without dropout; random numbers go on afterwards as if nothing had been."""
    modes = [(module, module.training) for module in lm.modules()]
    lm.eval()
    try:
        with replayed(random_state(device), device):
            yield
    finally:
        for module, training in modes:
            module.training = training


class Whole:
    """The whole model on the CPU, in fp32: its loss, and gradients one parameter at a time."""

    def __init__(self, model: CausalLM, units: list[Unit], host: HostState) -> None:
        self._model = model
        self._units = units
        self._host = host
        self._fed = small_batch(model, torch.device("cpu"))
        self._samples: dict[str, Tensor] = {}
        """Some numbers of every gradient."""
        self.loss = math.nan

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """While inside, parameters are the host's weights; they stay so until units are loaded again."""
        with _on_the_host(self._model.lm):
            for unit, arrays in zip(self._units, self._host.units, strict=True):
                for place in unit.places:
                    place.parameter.data = place.of(arrays.weights)
            yield

    def compared_with(self, gradients_of: Callable[[Unit], Tensor]) -> list[Difference]:
        """How far gradients, which lie as units do, are from those of the whole model; inside `at_hand`."""
        found: dict[str, Difference] = {}

        @torch.no_grad()
        def compare(unit: Unit, place: Place, parameter: Tensor) -> None:
            expected, got = parameter.grad, place.of(gradients_of(unit)).cpu()
            parameter.grad = None
            assert expected is not None
            self._samples[place.name] = _sample(expected)
            norms = {"expected": _norm(expected), "got": _norm(got)}
            found[place.name] = _difference(unit, place, **norms, differs=_norm(expected.sub_(got)))

        with ExitStack() as hooks:
            for unit, place in self._trained():
                hook = place.parameter.register_post_accumulate_grad_hook(partial(compare, unit, place))
                hooks.callback(hook.remove)
            with torch.enable_grad():
                loss = self._model.loss_sum(self._fed, slice(0, len(self._fed))) / self._fed.num_tokens
            loss.backward()
        self.loss = float(loss.detach())
        for unit, place in self._trained():
            if place.name not in found:
                got = _norm(place.of(gradients_of(unit)))
                found[place.name] = _difference(unit, place, expected=0.0, got=got, differs=got, unused=True)
        return list(found.values())

    def compared_with_parts(self, decoder: Decoder) -> tuple[float, list[Difference]]:
        """The loss of the decoder taken apart, in fp32 on the CPU too, and how far samples of its gradients are.

        After `compared_with`. What a run in bf16 rounds away shows here.
        """
        found: list[Difference] = []

        def compare(unit: Unit) -> None:
            for place in unit.places:
                made, place.parameter.grad = place.parameter.grad, None
                if place.parameter.requires_grad:
                    got = _sample(torch.zeros_like(place.parameter) if made is None else made)
                    expected = self._samples.get(place.name, torch.zeros_like(got))
                    norms = {"expected": _norm(expected), "got": _norm(got), "differs": _norm(expected - got)}
                    found.append(_difference(unit, place, **norms))

        return _learned_in_parts(decoder, self._units, self._fed, compare), found

    def _trained(self) -> Iterator[tuple[Unit, Place]]:
        for unit in self._units:
            for place in unit.places:
                if place.parameter.requires_grad:
                    yield unit, place


def _learned_in_parts(decoder: Decoder, units: list[Unit], fed: DeviceBatch, on_unit: Callable[[Unit], None]) -> float:
    """The loss of a batch, a layer at a time; a unit's parameters have their gradients when it is told of."""
    with torch.no_grad():
        befores = [decoder.before(fed, rows) for rows in PARTS]
        states = [[before.states for before in befores]]
        for layer in range(len(decoder.layers)):
            after = [decoder.layer(layer, s, b.calls[layer]) for s, b in zip(states[-1], befores, strict=True)]
            states.append(after)
    total, errors = 0.0, list[Tensor]()
    for rows, last in zip(PARTS, states.pop(), strict=True):
        last.requires_grad_()
        with torch.enable_grad():
            logits = decoder.head(decoder.behind(last, fed, rows))
        loss, error = loss_and_gradient(logits.detach(), fed.labels[rows], fed.num_tokens)
        torch.autograd.backward(logits, error)
        total += float(loss)
        assert last.grad is not None
        errors.append(last.grad)
    for layer in reversed(range(len(decoder.layers))):
        for part, (before, known) in enumerate(zip(befores, states.pop(), strict=True)):
            first = known.detach().requires_grad_()
            with torch.enable_grad():
                after = decoder.layer(layer, first, before.calls[layer])
            torch.autograd.backward(after, errors[part])
            assert first.grad is not None
            errors[part] = first.grad
        on_unit(units[layer + 1])
    for rows, error in zip(PARTS, errors, strict=True):
        with torch.enable_grad():
            first = decoder.before(fed, rows).states
        if first.requires_grad:
            torch.autograd.backward(first, error)
    on_unit(units[0])
    return total


def _sample(gradients: Tensor) -> Tensor:
    """Some thousand numbers from all over."""
    flat = gradients.flatten()
    return flat[:: max(1, len(flat) // _SAMPLES)].clone()


def _norm(gradients: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradients, dtype=torch.float32))


def _difference(unit: Unit, place: Place, **norms: Any) -> Difference:
    return Difference(name=place.name, unit=unit.index, decays=place.start < unit.decaying, **norms)


@contextmanager
def _on_the_host(lm: Any) -> Iterator[None]:
    """While inside, a model's buffers are on the CPU, and its attention is one that the CPU has."""
    buffers = [
        (module, name, buffer) for module in lm.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    attention = lm.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        lm.set_attn_implementation("sdpa")
    try:
        for module, name, buffer in buffers:
            setattr(module, name, buffer.cpu())
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        if attention not in ("sdpa", "eager"):
            lm.set_attn_implementation(attention)


def require_parity(
    kind: str, precision: Precision, loss: float, expected: float, differences: list[Difference], *, weight_decay: float
) -> None:
    """Refuse to train a model whose loss or gradients are not those of the reference."""
    advice = (
        f"{kind} cannot be trained like this: leave --streamed away, and report it with the model's config; nothing "
        "was learned"
    )
    if not abs(loss - expected) <= _OF_LOSS[precision] * abs(expected):
        raise TrainError(
            f"streamed, the model's loss on a small batch is {loss:.9g}, expected {expected:.9g} as the whole model "
            f"has it, within {_OF_LOSS[precision]:g} of it in {precision}: {advice}"
        )
    ratios = [(each.differs / _allowed(each, differences, precision), each) for each in differences]
    ratio, worst = max(ratios, key=lambda pair: (not math.isfinite(pair[0]), pair[0]))
    if not ratio <= 1:
        raise TrainError(
            f"streamed, the gradient of {worst.name} on a small batch has norm {worst.got:.6g}, expected "
            f"{worst.expected:.6g} as the whole model has it; they are {worst.differs:.6g} apart, {ratio:.1f} times "
            f"what rounding explains in {precision}: {advice}"
        )
    still = [each.name for each in differences if each.unused and each.decays and "expert" not in each.name]
    if still and weight_decay:
        raise TrainError(
            f"{', '.join(still[:3])} {'and more ' * (len(still) > 3)}of {kind} take no part in its loss: weight decay "
            "would pull them to 0 when streamed, where ordinarily it leaves them alone: set weight_decay=0, or leave "
            "--streamed away"
        )


def _allowed(each: Difference, all_of_them: list[Difference], precision: Precision) -> float:
    beside = all_of_them if precision == "fp32" else [other for other in all_of_them if other.unit == each.unit]
    whole = math.sqrt(sum(other.expected**2 for other in beside))
    with_experts = precision == "bf16" and any("expert" in other.name for other in all_of_them)
    part = _WITH_EXPERTS if with_experts else _OF_PARAMETER[precision]
    return max(1e-30, part * max(each.expected, _AT_LEAST[precision] * whole))

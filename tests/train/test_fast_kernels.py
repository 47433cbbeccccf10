"""What fast kernels are given and what is made of their answers; those of GPUs are replaced by plain mathematics.

A GPU's own kernels are compared with the whole sequence by ``benchmarks/long.py parity``.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.train.long import fast_kernels
from penstock.train.long.documents import Documents
from penstock.train.long.fast_kernels import CpuKernel, CudnnKernel, FlashKernel
from penstock.train.long.kernels import Kernel, Reach

pytestmark = pytest.mark.usefixtures("one_thread", "plain_mathematics")
CPU = torch.device("cpu")
HEADS, KEY_HEADS, DIM = 4, 2, 8


def attended(seen: Tensor, scale: float | None, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """``(heads, length, dim)`` each, and the normalisers."""
    keys, values = (part.repeat_interleave(len(query) // len(part), 0) for part in (keys, values))
    scores = query @ keys.transpose(1, 2) * (scale or 1 / math.sqrt(query.shape[-1]))
    scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def grads(
    seen: Tensor, scale: Any, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As flash attention has them, of the output and the normaliser of all keys, wherever these came from."""
    groups = len(query) // len(keys)
    wide_keys, wide_values = (part.repeat_interleave(groups, 0) for part in (keys, values))
    factor = scale or 1 / math.sqrt(query.shape[-1])
    scores = (query @ wide_keys.transpose(1, 2) * factor).masked_fill(~seen, -math.inf)
    shares = (scores - normaliser[..., None]).exp()
    of_scores = shares * (grad @ wide_values.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)) * factor
    of_keys, of_values = of_scores.transpose(1, 2) @ query, shares.transpose(1, 2) @ grad
    narrow = [part.unflatten(0, (-1, groups)).sum(1) for part in (of_keys, of_values)]
    return of_scores @ wide_keys, narrow[0], narrow[1]


def causal(queries: int, keys: int, window: int | None = None) -> Tensor:
    """Aligned to the last key."""
    places, seen = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    allowed = seen <= places
    return allowed if window is None else allowed & (seen >= places - window)


class Cudnn:
    """Sequences and heads first; normalisers with a dimension of their own."""

    @staticmethod
    def forward(query: Tensor, keys: Tensor, values: Tensor, *told: Any, scale: float | None) -> tuple[Any, ...]:
        assert told[:3] == (None, True, 0.0)
        seen = causal(query.shape[2], keys.shape[2]) if told[3] else torch.tensor([[True]])
        assert not told[3] or query.shape[2] == keys.shape[2]
        found = [attended(seen, scale, *parts) for parts in zip(query, keys, values, strict=True)]
        out = torch.stack([part for part, _ in found])
        laid = torch.empty_like(out.transpose(1, 2).contiguous()).transpose(1, 2).copy_(out)  # in memory as it came
        return laid, torch.stack([part for _, part in found])[..., None], *(None,) * 7

    @staticmethod
    def backward(*told: Any, scale: float | None) -> tuple[Any, ...]:
        grad, query, keys, values, out, normaliser = told[:6]
        assert told[11:14] == (query.shape[2], keys.shape[2], 0.0)
        assert normaliser.is_contiguous()
        seen = causal(query.shape[2], keys.shape[2]) if told[14] else torch.tensor([[True]])
        parts: Any = zip(grad, query, keys, values, out, normaliser[..., 0], strict=True)
        found = [grads(seen, scale, *part) for part in parts]
        return tuple(torch.stack(part) for part in zip(*found, strict=True))


class Flash:
    """Length before heads; several segments of one sequence, or whole sequences."""

    @classmethod
    def forward(cls, query: Tensor, keys: Tensor, values: Tensor, *told: Any, **more: Any) -> tuple[Any, ...]:
        found = [
            attended(causal(parts[0].shape[1], parts[1].shape[1], more["window_size_left"]), more["scale"], *parts)
            for parts in cls._segments((query, keys, values), told)
        ]
        if told[0] is not None:
            out = torch.cat([part for part, _ in found], 1).transpose(0, 1)
            return out, torch.cat([part for _, part in found], 1), *(None,) * 3
        return (
            torch.stack([part for part, _ in found]).transpose(1, 2),
            torch.stack([p for _, p in found]),
            *(None,) * 3,
        )

    @classmethod
    def backward(cls, *told: Any, **more: Any) -> tuple[Any, ...]:
        grad, query, keys, values, out, normaliser = told[:6]
        packed = told[6] is not None
        normalisers = normaliser.split(told[6].diff().tolist(), 1) if packed else normaliser
        laid = cls._segments((grad, query, keys, values, out), told[6:], of_queries=(0, 1, 4))
        sets: list[Any] = [(*left, right) for left, right in zip(laid, normalisers, strict=True)]
        window, scale = more["window_size_left"], more["scale"]
        found = [grads(causal(parts[1].shape[1], parts[2].shape[1], window), scale, *parts) for parts in sets]
        columns = list(zip(*found, strict=True))
        if packed:
            return tuple(torch.cat(part, 1).transpose(0, 1) for part in columns)
        return tuple(torch.stack(part).transpose(1, 2) for part in columns)

    @staticmethod
    def _segments(tensors: tuple[Tensor, ...], told: Any, of_queries: tuple[int, ...] = (0,)) -> list[Any]:
        if told[0] is None:
            return list(zip(*(part.transpose(1, 2) for part in tensors), strict=True))
        lengths = [told[0].diff().tolist(), told[1].diff().tolist()]
        assert (max(lengths[0]), max(lengths[1])) == told[2:4]
        cut = [part.transpose(0, 1).split(lengths[n not in of_queries], 1) for n, part in enumerate(tensors)]
        return list(zip(*cut, strict=True))


@pytest.fixture
def plain_mathematics(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.ops.aten
    fake = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=Cudnn.forward,
        _scaled_dot_product_cudnn_attention_backward=Cudnn.backward,
        _flash_attention_forward=Flash.forward,
        _flash_attention_backward=Flash.backward,
        _scaled_dot_product_flash_attention_for_cpu=real._scaled_dot_product_flash_attention_for_cpu,
        _scaled_dot_product_flash_attention_for_cpu_backward=(
            real._scaled_dot_product_flash_attention_for_cpu_backward
        ),
    )
    monkeypatch.setattr(fast_kernels, "_aten", fake)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    fast_kernels._runs.cache_clear()  # pyright: ignore[reportPrivateUsage]


KERNELS: dict[str, Kernel] = {"cudnn": CudnnKernel(0.3), "flash": FlashKernel(0.3), "cpu": CpuKernel(0.3)}


def check(kernel: Kernel, documents: Documents, start: int, stop: int, window: int | None = None) -> None:
    """A chunk against attention with a mask over all keys, which autograd goes back through."""
    reach = Reach(documents, start, stop, window)
    chance = torch.Generator().manual_seed(start * 100 + stop)
    shapes = [(stop - start, HEADS), (stop - reach.first_key, KEY_HEADS), (stop - reach.first_key, KEY_HEADS)]
    inputs = [
        torch.randn(documents.sequences, *shape, DIM, dtype=torch.float64, generator=chance, requires_grad=True)
        for shape in shapes
    ]
    mask = reach.mask().expand(documents.sequences, 1, -1, -1)
    laid: Any = zip(*(part.transpose(1, 2) for part in inputs), mask, strict=True)
    expected = torch.stack([attended(seen, 0.3, *parts)[0] for *parts, seen in laid]).transpose(1, 2)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=chance)
    expected.backward(grad)
    query, keys, values = (part.detach() for part in inputs)
    found, kept = kernel.forward(query, keys, values, reach)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
    for part, wanted in zip(kernel.backward(grad, query, keys, values, kept, reach), inputs, strict=True):
        torch.testing.assert_close(part, wanted.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.lists(st.integers(1, 29), max_size=4), min_size=1, max_size=3),
    start=st.integers(0, 25),
    length=st.integers(1, 12),
)
def test_a_chunk_sees_what_a_mask_would_let_it_see(name: str, cuts: list[list[int]], start: int, length: int) -> None:
    document_ids = np.zeros((len(cuts), 30), np.int64)
    for row, places in zip(document_ids, cuts, strict=True):
        for place in places:
            row[place:] += 1
    check(KERNELS[name], Documents(document_ids, CPU), start, min(start + length, 30))


@pytest.mark.parametrize("window", [1, 3, 9, 40])
@pytest.mark.parametrize("start", [0, 5, 20])
@pytest.mark.parametrize("cut", [0, 4, 17, 22])
def test_flash_attention_sees_no_further_than_a_window(window: int, start: int, cut: int) -> None:
    document_ids = np.zeros((2, 30), np.int64)
    document_ids[1, cut:] = 1
    check(KERNELS["flash"], Documents(document_ids, CPU), start, start + 8, window)

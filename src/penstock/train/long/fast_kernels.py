"""Attention of chunks by kernels that need no memory of queries times keys.

Keys of a document that began in an earlier chunk are seen by every query of it: a rectangle, without a mask. The
chunk's own keys are seen causally: a square. On CPUs, and on GPUs that cuDNN has its fastest kernels for, the two are
computed apart and merged by their normalisers. On other GPUs, and where a query sees no further than a window, flash
attention computes both at once, aligned to the last key.

Queries, keys and values are ``(sequences, length, heads, dim)``, normalisers (the logarithm of what a softmax divides
by) ``(sequences, heads, length)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.train.long.kernels import Kernel, Reach

_aten = torch.ops.aten


class Grads(NamedTuple):
    """Gradients, each of the shape of what it is for."""

    query: Tensor
    keys: Tensor
    values: Tensor


class Computed(NamedTuple):
    """Attention that was computed, and the gradient of what came of it."""

    grad: Tensor
    query: Tensor
    keys: Tensor
    values: Tensor
    attended: Tensor
    normaliser: Tensor

    def laid(self) -> Iterator[Tensor]:
        """All but the normaliser as ``(sequences, heads, length, dim)``."""
        return (part.transpose(1, 2) for part in self[:-1])


_SPLIT_FROM = 2_048 * 8_192
"""Queries times earlier keys from which it is worth it to compute the two apart: calls cost time too."""


def fast_kernel(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, reach: Reach) -> Kernel | None:
    """What computes plain attention fastest here; None where nothing of the kind does."""
    dim = query.shape[-1]
    if not (query.dtype == keys.dtype == values.dtype and dim == keys.shape[-1] == values.shape[-1]):
        return None
    if query.device.type == "cpu":
        return CpuKernel(scaling) if reach.window is None else None
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16) or dim % 8 or dim > 256:
        return None
    capability = torch.cuda.get_device_capability(query.device)
    has_cudnn = capability >= (9, 0) and dim <= 128 and torch.backends.cuda.cudnn_sdp_enabled()
    worth_it = (reach.stop - reach.start) * (reach.start - reach.first_key) >= _SPLIT_FROM
    if has_cudnn and worth_it and reach.window is None:
        return CudnnKernel(scaling)
    return FlashKernel(scaling) if capability >= (8, 0) else None


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """Flash attention as torch has it built in: keys may have fewer heads than queries, documents are segments."""

    scaling: float | None

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, tuple[Tensor, ...]]:
        found = [
            self._attended(query[run.rows], keys[run.rows, run.keys], values[run.rows, run.keys], run)
            for run in _runs(reach, query.device)
        ]
        attended = found[0][0] if len(found) == 1 else torch.cat([part for part, _ in found])
        normaliser = found[0][1] if len(found) == 1 else torch.cat([part for _, part in found])
        return attended, (attended, normaliser)

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, kept: tuple[Tensor, ...], reach: Reach
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, normaliser = kept
        runs = _runs(reach, query.device)
        if len(runs) == 1 and runs[0].keys.start is None:
            return self._grads(grad, query, keys, values, attended, normaliser, runs[0])
        grads = Grads(*(torch.zeros_like(part) for part in (query, keys, values)))
        for run in runs:
            seen = run.rows, run.keys
            found = self._grads(
                grad[run.rows],
                query[run.rows],
                keys[seen],
                values[seen],
                attended[run.rows],
                normaliser[run.rows],
                run,
            )
            grads.query[run.rows], grads.keys[seen], grads.values[seen] = found
        return grads

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, run: _Run) -> tuple[Tensor, Tensor]:
        found, normaliser, *_ = _aten._flash_attention_forward(
            *(run.laid(part) for part in (query, keys, values)),
            *run.ends,
            0.0,  # no dropout
            True,  # causal
            False,
            scale=self.scaling,
            window_size_left=run.window_left,
            window_size_right=None if run.window_left is None else 0,
        )
        return found.view(query.shape), normaliser.view(len(query), -1, query.shape[1])

    def _grads(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, attended: Tensor, normaliser: Tensor, run: _Run
    ) -> Grads:
        nothing = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
        found = _aten._flash_attention_backward(
            *(run.laid(part.contiguous()) for part in (grad, query)),
            *(run.laid(part) for part in (keys, values, attended)),
            normaliser if run.packed is False else normaliser[0],
            *run.ends,
            0.0,
            True,
            nothing,
            nothing,
            scale=self.scaling,
            window_size_left=run.window_left,
            window_size_right=None if run.window_left is None else 0,
        )
        return Grads(*(part.view(like.shape) for part, like in zip(found, (query, keys, values), strict=True)))


@dataclass(frozen=True, slots=True)
class SplitKernel(ABC):
    """Earlier keys and own keys apart, merged by their normalisers."""

    scaling: float | None

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, tuple[Tensor, ...]]:
        attended, normaliser = self.square(query, _own(keys, reach), _own(values, reach), reach.own())
        for rows, until, seen in _rectangles(reach):
            found, other = self.rectangle(query[rows, :until], keys[rows, seen], values[rows, seen])
            mine, my_normaliser = attended[rows, :until], normaliser[rows, :, :until]
            share = torch.sigmoid(other - my_normaliser).transpose(1, 2)[..., None]
            mine.copy_(torch.lerp(mine.to(share.dtype), found.to(share.dtype), share))
            my_normaliser.copy_(torch.logaddexp(other, my_normaliser))
        return attended, (attended, normaliser)

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, kept: tuple[Tensor, ...], reach: Reach
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With the output and normaliser of all keys, the gradients of some are their share of the whole's."""
        attended, normaliser = kept
        of = Computed(grad, query, _own(keys, reach), _own(values, reach), attended, normaliser)
        own = self.square_grads(of, reach.own())
        if reach.first_key == reach.start:
            return own
        earlier = [torch.zeros_like(part[:, : reach.start - reach.first_key]) for part in (keys, values)]
        for rows, until, seen in _rectangles(reach):
            of = Computed(
                grad[rows, :until],
                query[rows, :until],
                keys[rows, seen],
                values[rows, seen],
                attended[rows, :until],
                normaliser[rows, :, :until],
            )
            found = self.rectangle_grads(of)
            own.query[rows, :until] += found.query
            earlier[0][rows, seen], earlier[1][rows, seen] = found.keys, found.values
        return own.query, torch.cat([earlier[0], own.keys], 1), torch.cat([earlier[1], own.values], 1)

    @abstractmethod
    def square(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        """What a chunk attends to in itself, and the normalisers."""

    @abstractmethod
    def square_grads(self, of: Computed, reach: Reach) -> Grads: ...

    @abstractmethod
    def rectangle(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What queries attend to that see all of some keys, and the normalisers."""

    @abstractmethod
    def rectangle_grads(self, of: Computed) -> Grads: ...


@dataclass(frozen=True, slots=True)
class CudnnKernel(SplitKernel):
    """By cuDNN, but for squares that documents divide: those by flash attention."""

    def square(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        if reach.documents.whole:
            return self._attended(query, keys, values, causal=True)
        attended, (_, normaliser) = FlashKernel(self.scaling).forward(query, keys, values, reach)
        return attended, normaliser

    def square_grads(self, of: Computed, reach: Reach) -> Grads:
        if reach.documents.whole:
            return self._grads(of, causal=True)
        kept = of.attended, of.normaliser
        return Grads(*FlashKernel(self.scaling).backward(of.grad, of.query, of.keys, of.values, kept, reach))

    def rectangle(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._attended(query, keys, values, causal=False)

    def rectangle_grads(self, of: Computed) -> Grads:
        return self._grads(of, causal=False)

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        laid = (part.transpose(1, 2) for part in (query, keys, values))
        found, normaliser, *_ = _aten._scaled_dot_product_cudnn_attention(
            *laid, None, True, 0.0, causal, False, scale=self.scaling
        )
        return found.transpose(1, 2), normaliser[..., 0]

    def _grads(self, of: Computed, *, causal: bool) -> Grads:
        nothing = torch.empty((), dtype=torch.int64, device=of.query.device)  # of dropout, which there is none of
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            *of.laid(),
            of.normaliser.contiguous()[..., None],
            nothing,
            nothing,
            None,
            None,
            None,
            of.query.shape[1],
            of.keys.shape[1],
            0.0,
            causal,
            scale=self.scaling,
        )
        return Grads(*(part.transpose(1, 2) for part in found))


@dataclass(frozen=True, slots=True)
class CpuKernel(SplitKernel):
    """By torch's kernel for CPUs; a mask only within a chunk, where documents divide it."""

    def square(self, query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        return self._attended(query, keys, values, causal=True, mask=_added(reach, query.dtype))

    def square_grads(self, of: Computed, reach: Reach) -> Grads:
        return self._grads(of, causal=True, mask=_added(reach, of.query.dtype))

    def rectangle(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._attended(query, keys, values, causal=False, mask=None)

    def rectangle_grads(self, of: Computed) -> Grads:
        return self._grads(of, causal=False, mask=None)

    def _attended(
        self, query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found, normaliser = _aten._scaled_dot_product_flash_attention_for_cpu(
            *(part.transpose(1, 2) for part in (query, keys, values)),
            0.0,
            causal and mask is None,
            attn_mask=mask,
            scale=self.scaling,
        )
        return found.transpose(1, 2), normaliser

    def _grads(self, of: Computed, *, causal: bool, mask: Tensor | None) -> Grads:
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *of.laid(), of.normaliser, 0.0, causal and mask is None, attn_mask=mask, scale=self.scaling
        )
        return Grads(*(part.transpose(1, 2) for part in found))


def _added(reach: Reach, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores so that documents do not see each other; None where there is nothing to keep apart."""
    if reach.documents.whole:
        return None
    seen = reach.mask()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences that flash attention computes at once, and which of the given keys they see."""

    rows: slice
    keys: slice
    ends: tuple[Tensor | None, Tensor | None, int, int]
    """Where segments end, of queries and of keys, and how long the longest is."""
    window_left: int | None

    @property
    def packed(self) -> bool:
        return self.ends[0] is not None

    def laid(self, tensor: Tensor) -> Tensor:
        """As the kernel takes it: of one sequence in segments, without the dimension that says it is one."""
        return tensor[0] if self.packed else tensor


@lru_cache(maxsize=4)  # the same for all layers
def _runs(reach: Reach, device: torch.device) -> list[_Run]:
    window_left = None if reach.window is None else reach.window - 1
    everything = slice(None)
    if reach.documents.whole:
        lengths = reach.stop - reach.start, reach.stop - reach.first_key
        return [_Run(everything, everything, (None, None, *lengths), window_left)]
    runs: list[_Run] = []
    for sequence, found in enumerate(reach.documents.segments(reach.start, reach.stop)):
        # All sequences are given the same keys; a document may begin later, or a window's end lie in it.
        first = max(found.first_key, reach.first_key)
        key_ends = [0, *(end - (first - found.first_key) for end in found.key_ends[1:])]
        ends = torch.tensor([found.query_ends, key_ends], dtype=torch.int32)
        most_queries, most_keys = ends.diff(dim=1).amax(1).tolist()
        on_device = ends.pin_memory().to(device, non_blocking=True)
        keys = slice(first - reach.first_key, None)
        told = on_device[0], on_device[1], most_queries, most_keys
        runs.append(_Run(slice(sequence, sequence + 1), keys, told, window_left))
    return runs


def _rectangles(reach: Reach) -> Iterator[tuple[slice, int, slice]]:
    """Which sequences' queries, up to which, see which of the given keys of earlier chunks."""
    earlier = reach.start - reach.first_key
    if reach.documents.whole:
        if earlier:
            yield slice(None), reach.stop - reach.start, slice(0, earlier)
        return
    for sequence, found in enumerate(reach.documents.segments(reach.start, reach.stop)):
        if found.first_key < reach.start:
            yield (
                slice(sequence, sequence + 1),
                found.query_ends[1],
                slice(found.first_key - reach.first_key, earlier),
            )


def _own(tensor: Tensor, reach: Reach) -> Tensor:
    """Of keys or values, those of the chunk itself."""
    return tensor[:, reach.start - reach.first_key :]

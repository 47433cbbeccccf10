"""The memory of a device: what is left of a budget holds units there for good.

What a batch needs is not guessed: a step is made without residents, its peak is looked at, and units move in while they
fit. They leave before a batch that is larger than any before, and where gaps between allocations leave too little.
"""

from __future__ import annotations

import os

import torch

from penstock.errors import ConfigError
from penstock.train.device_batch import DeviceBatch
from penstock.train.streamed.resident import Resident
from penstock.train.streamed.streaming import Streaming
from penstock.train.streamed.visiting import VisitingAdam

SPARE_BYTES = 192 << 20
"""Of a budget, left for gaps between allocations."""
_CONTEXT_BYTES = 920 << 20
"""What CUDA itself takes of a budget: its context and its kernels."""
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_LOOKS = 3
"""How often what is left of a budget is looked at: residents change where the peak of a step is."""


class Placing:
    """Decides which units stay on the device. Without a budget, none does."""

    def __init__(self, streaming: Streaming, gpu_budget_gib: float | None) -> None:
        self._streaming = streaming
        self._device = streaming.device
        self._budget = budget_bytes(self._device, gpu_budget_gib)
        self._limited = gpu_budget_gib is not None and self._budget is not None
        if gpu_budget_gib is not None and self._budget is not None:
            whole = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget / whole), self._device)
        self._largest = (0, 0)
        self._looks_left = _LOOKS

    def make_room(self, batch: DeviceBatch, rows: int) -> None:
        """A batch larger than any before needs more than was looked at: residents leave first.

        Args:
            batch: What comes.
            rows: Sequences of it at a time.
        """
        if self._budget is None:
            return
        length = batch.input_ids.shape[1] if len(batch) else 0
        size = len(batch) * length, min(rows, len(batch)) * length
        if size[0] > self._largest[0] or size[1] > self._largest[1]:
            self._largest = max(size[0], self._largest[0]), max(size[1], self._largest[1])
            self._begin_again()

    def make_more_room(self) -> None:
        """After memory was short: all residents leave, and fewer come back."""
        streaming = self._streaming
        if self._budget is not None:
            largest = max(Resident.num_bytes(unit, streaming.gradient_dtype(unit)) for unit in streaming.units[1:])
            self._budget -= 2 * largest
        self._begin_again()
        torch.cuda.empty_cache()

    def forget(self) -> None:
        """Weights come from elsewhere: residents are out of date."""
        self._streaming.give_residents_back()
        self._looks_left = _LOOKS

    def _begin_again(self) -> None:
        self.forget()
        if self._budget is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def use_what_is_left(self) -> None:
        """After gradients that showed what a batch of this size needs: units move in while the budget lasts."""
        streaming = self._streaming
        if not self._looks_left or self._budget is None or streaming.sharing.world > 1:
            return
        self._looks_left -= 1
        left = self._budget - SPARE_BYTES - torch.cuda.max_memory_allocated(self._device)
        count = len(streaming.residents)
        if not streaming.visiting:
            left -= VisitingAdam.num_bytes(streaming.gradient_dtype(streaming.units[1]))
        for unit in streaming.units[count:]:
            need = Resident.num_bytes(unit, streaming.gradient_dtype(unit))
            if unit.index == 0:  # all through a step it is there anyway
                need -= unit.size * (streaming.host.units[0].image.itemsize + 4)
            if need > left:
                break
            left -= need
            count += 1
        if count > len(streaming.residents) or not streaming.visiting:
            streaming.use_device(count, range(max(1, count), len(streaming.units)))
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        if self._limited:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)


def let_segments_grow(device: torch.device) -> None:
    """Have CUDA's allocator keep what is freed in pieces that grow together again: a budget leaves little for gaps.

    Before anything is taken; unless somebody has said how it is to be done.
    """
    if device.type == "cuda" and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # pyright: ignore


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

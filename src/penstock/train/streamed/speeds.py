"""How fast a machine is at what a streamed step does: measured in a moment, or known by the device's name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.train.trainer import Precision

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Operations a second in bf16 on dense matrices, by what a GPU calls itself; longer names are looked for first."""

_COPY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a machine can do in a second."""

    flops: float
    """Operations, on one device."""
    link_bytes: float | None
    """From host to device, and as many back at the same time; None where the host computes."""
    memory_bytes: float
    """Read and written, of host memory."""


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """A device's own peak; None where it is not known."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """The peak of a GPU by its name."""
    for known in sorted(_PEAKS, key=len, reverse=True):
        if re.search(rf"(?<![A-Z0-9]){known}(?![0-9])", name):
            return _PEAKS[known]
    return None


@torch.no_grad()
def measure(device: torch.device, precision: Precision) -> Speeds:
    """Find out in some tens of milliseconds."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    side = 8192 if device.type == "cuda" else 512
    one, other = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    flops = 2 * side**3 / _seconds(lambda: one @ other, device)
    here, there = (torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    memory = 2 * _COPY_BYTES / _seconds(lambda: there.copy_(here), torch.device("cpu"))
    link = None
    if device.type == "cuda":
        pinned, far = here.pin_memory(), torch.empty_like(here, device=device)
        link = _COPY_BYTES / _seconds(lambda: far.copy_(pinned, non_blocking=True), device)
    return Speeds(flops=flops, link_bytes=link, memory_bytes=memory)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """The best of a few, after one that warms up."""
    taken: list[float] = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return max(1e-9, min(taken[1:]))

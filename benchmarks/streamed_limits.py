"""What the machine itself can do of each term of a streamed step: the link, the host's optimizer, the matrix units."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_LAYER_PARAMETERS = 77_000_000
"""About one layer of the 3.09 B shape."""
_COPY_BYTES = 256 << 20
_MATRIX = 8_192


def limits(device: torch.device) -> dict[str, Any]:
    """Rates, each the median of a few; those of the GPU only where there is one."""
    told: dict[str, Any] = {"threads": torch.get_num_threads(), **_optimizer()}
    if device.type == "cuda":
        told["device"] = torch.cuda.get_device_name(device)
        told |= _link(device)
        one, other = (torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
        seconds = _seconds(lambda: one @ other, device, times=10)
        told["bf16_matmul_tflop_per_s"] = round(2 * _MATRIX**3 / seconds / 1e12)
    return told


def _optimizer() -> dict[str, float]:
    """AdamW in one kernel on one flat layer, alone and with the bf16 image that is made of it."""
    weight = torch.nn.Parameter(torch.zeros(_LAYER_PARAMETERS))
    weight.grad = torch.ones_like(weight)
    image = torch.zeros(_LAYER_PARAMETERS, dtype=torch.bfloat16)
    adamw = torch.optim.AdamW([weight], lr=1e-5, fused=True)
    host = torch.device("cpu")

    def with_image() -> None:
        adamw.step()
        image.copy_(weight.detach())

    rates = {
        "host_adamw_gparam_per_s": _LAYER_PARAMETERS / _seconds(adamw.step, host) / 1e9,
        "host_adamw_and_image_gparam_per_s": _LAYER_PARAMETERS / _seconds(with_image, host) / 1e9,
    }
    return {name: round(rate, 2) for name, rate in rates.items()}


def _link(device: torch.device) -> dict[str, float]:
    there, back = (torch.zeros(_COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
    into, out_of = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_in() -> None:
        with torch.cuda.stream(streams[0]):
            into.copy_(there, non_blocking=True)

    def copy_out() -> None:
        with torch.cuda.stream(streams[1]):
            back.copy_(out_of, non_blocking=True)

    def both() -> None:
        copy_in()
        copy_out()

    ways = {"link_in_gb_per_s": copy_in, "link_out_gb_per_s": copy_out, "link_each_way_at_once_gb_per_s": both}
    return {name: round(_COPY_BYTES / _seconds(way, device, times=10) / 1e9, 1) for name, way in ways.items()}


def _seconds(work: Callable[[], object], device: torch.device, *, times: int = 1, rounds: int = 5) -> float:
    """Of one of some `times`; the median of some rounds after one that warms up."""
    taken: list[float] = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) / times)
    return statistics.median(taken[1:])

"""Memory of host and GPU as `streamed.py` sees it: what is left, what the most was, and a limit that is kept."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import torch

from measuring import log
from penstock.train.chunk_size import free_bytes

GIB = 1 << 30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_all() -> None:
    """Device and pinned host memory that nobody uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pyright: ignore[reportPrivateUsage]


def limit(device: torch.device, gib: float) -> None:
    """From now on have the GPU's allocator refuse more than that."""
    if device.type == "cuda":
        free_all()
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), device)


def unlimit(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def available_gib() -> float:
    """What the host can still give; pinned memory is seen here, which a process's own figure may not have."""
    return free_bytes() / GIB


def gpu_peaks_gib(device: torch.device) -> dict[str, float]:
    """The most since peaks were forgotten, and what the whole device has given at this moment."""
    if device.type != "cuda":
        return {}
    available, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved(device) / GIB, 2),
        "device_used_gib": round((total - available) / GIB, 2),  # with what CUDA and its libraries take
    }


def rss_peak_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    return round((kib or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024 / GIB, 1)


def forget_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        log(f"the peak of host memory is that of the whole process, not of each contender: {error}")

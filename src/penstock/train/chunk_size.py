"""`dataset_chunk_size="auto"`: as many samples a chunk as memory and workers make sensible."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.blocks.manifest import Manifest

_BYTES_PER_TEXT_BYTE = 12
"""A chunk in hand is its stored bytes, its texts and its tokens; and the next one is prepared beside it."""
_SHARE = 0.05
"""Of the memory that is free, for all workers together."""
_LARGEST_CHUNK_BYTES = 64 << 20
_CHUNKS_PER_WORKER = 16
"""At least so many an epoch: fast workers take more chunks only where there are some to take."""


def choose_chunk_size(manifest: Manifest, workers: int, free: int | None = None) -> int:
    """Samples a chunk, by the mean size of a sample of this data set.

    Args:
        manifest: Of the data set.
        workers: How many hold a chunk at a time.
        free: Bytes of memory that are free; found out where not given.
    """
    free = free_bytes() if free is None else free
    stored = sum(block.size_bytes for block in manifest.blocks)
    sample_bytes = max(1.0, stored / max(1, manifest.total_samples))
    budget = min(_LARGEST_CHUNK_BYTES, free * _SHARE / max(1, workers) / _BYTES_PER_TEXT_BYTE)
    by_memory = int(budget / sample_bytes)
    by_workers = manifest.total_samples // (_CHUNKS_PER_WORKER * max(1, workers))
    return max(1, min(by_memory, max(by_workers, 1), manifest.header.block_size))


def free_bytes() -> int:
    """What the machine has free, or its control group still grants, whichever is less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdecimal():
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free

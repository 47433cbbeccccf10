"""How fast pages come under one setting: measured in a process of its own, so that its memory is its own too."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np


class Setting(NamedTuple):
    """What is loaded, and how."""

    dataset: str | None
    tokenizer: str
    n_pages: int
    rows_per_page: int
    seed: int
    requests: int
    batch_size: int
    sequence_length: int
    buffer_mb: int
    offset: int = 0

    def told(self) -> dict[str, Any]:
        """What was varied."""
        return {
            "requests": self.requests,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "buffer_mb": self.buffer_mb,
        }


def in_a_process(setting: Setting) -> dict[str, float]:
    """Measure in a process that does nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, setting).result()


def measure(setting: Setting) -> dict[str, float]:
    """From choosing the pages to their last batch. The tokenizer is loaded before, and no token is kept or found."""
    from penstock.feed.loading import load_tokenizer
    from penstock.pages.loader import R2DatasetLoader

    class Loader(R2DatasetLoader):
        MAX_CONCURRENT_REQUESTS = setting.requests
        READ_BUFFER_SIZE = setting.buffer_mb << 20
        TOKEN_CACHE_BYTES = 0

    tokenizer = load_tokenizer(setting.tokenizer)
    began = last = time.perf_counter()
    chosen = Loader.next_pages(
        setting.offset, setting.n_pages, setting.seed, setting.rows_per_page, dataset=setting.dataset
    )
    loader = Loader.create(setting.batch_size, setting.sequence_length, chosen, tokenizer)
    times: list[float] = []
    tokens = 0
    for batch in loader.batches():
        now = time.perf_counter()
        times.append(now - last)
        last = now
        tokens += batch.num_tokens
    elapsed = time.perf_counter() - began
    spread = np.array(times) if times else np.zeros(1)
    return {
        "tokens_per_s": tokens / elapsed,
        "mb_per_s": loader.dataset.bytes_read / elapsed / 1e6,
        "total_s": elapsed,
        "first_batch_s": float(spread[0]),
        "batch_p50_s": float(np.percentile(spread, 50)),
        "batch_p99_s": float(np.percentile(spread, 99)),
        "batches": float(len(times)),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each figure's median."""
    return {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}

"""Penstock: whole objects as bytes, or where they arrived; pages through R2DatasetLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.storage import ObjectStorage, open_storage


def getter(task: dict[str, Any]) -> Callable[[str], int]:
    store = open_storage(f"s3://{task['bucket']}")
    assert isinstance(store, ObjectStorage)
    return (lambda key: len(store.view(key))) if task.get("view") else (lambda key: len(store.get(key)))


def tokenizer(task: dict[str, Any]) -> Any:
    from penstock.feed.loading import load_tokenizer

    return load_tokenizer(task["tokenizer"])


def pages(task: dict[str, Any], tokenizer: Any) -> Iterator[np.ndarray]:
    from penstock import R2DatasetLoader

    R2DatasetLoader.MAX_CONCURRENT_REQUESTS = task["requests"]
    R2DatasetLoader.TOKEN_CACHE_BYTES = 0
    if task["dataset"] is None:  # the environment's buckets
        R2DatasetLoader.DATASET_SUBFOLDER = task["subfolder"]
    chosen = R2DatasetLoader.next_pages(
        offset=task.get("offset", 0),
        n_pages=task["n_pages"],
        seed=task["seed"],
        num_rows_per_page=task["rows"],
        dataset=task["dataset"],
    )
    yield from R2DatasetLoader.create(task["batch"], task["width"], chosen, tokenizer, dataset=task["dataset"])

"""Penstock's DistributedLoader: packed documents or fixed rows from the token cache, or from raw text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock import DistributedLoader


class Packed:
    """Batches of ids from a token cache."""

    def __init__(self, loader: DistributedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch["input_ids"]

    def state(self) -> Any:
        return self._loader.state_dict()


def open_rows(task: dict[str, Any]) -> Any:
    if task.get("mode") == "texts":
        return open_ids(task)
    loader = DistributedLoader(
        task["store"],
        task["batch"],
        task["seed"],
        tokenizer=task["tokenizer"],
        sequence_length=task["width"],
        fields=("input_ids",),
        order=task.get("order", "shard-local"),
    )
    if task.get("state"):
        loader.load_state_dict(task["state"])
    return Packed(loader)


class Ids:
    """Batches of texts, of which the ids count."""

    def __init__(self, loader: DistributedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            assert len(batch["text"]) == len(batch["sample_ids"])
            yield batch["sample_ids"][:, None]

    def state(self) -> Any:
        return self._loader.state_dict()


def open_ids(task: dict[str, Any]) -> Ids:
    loader = DistributedLoader(
        task["store"],
        task["batch"] * task["world"],
        task["seed"],
        rank=task["rank"],
        world_size=task["world"],
        order=task.get("order", "shard-local"),
    )
    if task.get("state"):
        loader.load_state_dict(task["state"])
    return Ids(loader)


def open_texts(task: dict[str, Any]) -> Iterator[Any]:
    """Raw text to batches: a fresh token cache, and where the source is a file, a fresh block store too."""
    from penstock.blocks import BlockManager
    from penstock.feed import TokenCache
    from penstock.feed.loading import load_tokenizer

    store = task["store"]
    if task.get("ingest"):
        from penstock.blocks import ingest

        store = task["fresh"] + "/store"
        ingest(task["texts"], store)
    blocks = BlockManager(store)
    cache = TokenCache(blocks, load_tokenizer(task["tokenizer"], blocks), folder=task["fresh"] + "/tokens")
    loader = DistributedLoader(
        blocks,
        task["batch"],
        task["seed"],
        tokenizer=cache.tokenizer,
        sequence_length=task["width"],
        fields=("input_ids",),
        cache=cache,
    )
    for batch in loader:
        yield batch["input_ids"]


def seek(task: dict[str, Any]) -> dict[str, Any]:
    """Open a store, go to a share of its epoch, and take a batch there."""
    import time

    began = time.perf_counter()
    loader = DistributedLoader(task["store"], task["batch"], task["seed"], order=task["order"])
    total = loader.batches_per_epoch
    opened = time.perf_counter()
    loader.load_state_dict({**loader.state_dict(), "step": int(task["share"] * total)})
    batch = next(iter(loader))
    now = time.perf_counter()
    assert len(batch["sample_ids"]) == task["batch"]
    return {
        "open_s": opened - began,
        "seek_s": now - opened,
        "at": now,
        "rss_mb": _peak_mb(),
    }


def indices(task: dict[str, Any]) -> dict[str, Any]:
    """Indices of an order a second, on one core: a run of them as long as a batch of batches, anywhere."""
    import os
    import time

    import numpy as np

    from penstock.plans.orders import make_order

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    order = make_order(task["order"], task["samples"], seed=7, epoch=1, source="", chunk_size=1_000, window_chunks=32)
    wanted = np.arange(task["samples"] // 2, task["samples"] // 2 + task["count"])
    order.at(wanted)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < task["seconds"]:
        order.at(wanted)
        count += len(wanted)
    return {"indices_per_s": count / (time.perf_counter() - began)}


def _peak_mb() -> float:
    """Of this process alone: what getrusage tells begins with the parent's."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

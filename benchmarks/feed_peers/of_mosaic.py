"""mosaicml-streaming: MDS shards of arrays, its own loader and its own elastic state."""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np


def _do_without_torchvision() -> None:
    """The library imports torchvision for its picture data sets, and there is none that goes with torch for the CPU
    everywhere. Nothing measured here uses it, so empty names stand for it; the import is the quicker for that."""
    for name, names in {
        "torchvision": (),
        "torchvision.transforms": (),
        "torchvision.transforms.functional": ("to_tensor",),
        "torchvision.datasets": ("VisionDataset",),
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for each in names:
            setattr(module, each, type(each, (), {}))
        sys.modules[name] = module


def prepare(task: dict[str, Any]) -> None:
    _do_without_torchvision()
    from streaming import MDSWriter

    rows = np.fromfile(task["rows"], dtype=np.uint16).reshape(-1, task["width"])
    columns = {"ids": f"ndarray:uint16:{task['width']}"}
    with MDSWriter(out=task["folder"], columns=columns, size_limit=task.get("shard_bytes", 1 << 26)) as out:
        for row in rows:
            out.write({"ids": row})


class Mosaic:
    def __init__(self, task: dict[str, Any]) -> None:
        _do_without_torchvision()
        import torch
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # what a killed run leaves behind would stand in the way of this one
        rows = StreamingDataset(local=task["folder"], shuffle=True, shuffle_seed=task["seed"], batch_size=task["batch"])
        self._loader = StreamingDataLoader(
            rows,
            batch_size=task["batch"],
            num_workers=task.get("workers", 0),
            collate_fn=lambda samples: torch.from_numpy(np.stack([sample["ids"] for sample in samples])),
            persistent_workers=task.get("workers", 0) > 0,
        )
        if task.get("state"):
            self._loader.load_state_dict(task["state"])

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def state(self) -> Any:
        return self._loader.state_dict()


def open_rows(task: dict[str, Any]) -> Mosaic:
    return Mosaic(task)

"""webdataset: tar shards of raw arrays, a shuffle buffer. It has no state: resuming is skipping what was seen."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 12


def prepare(task: dict[str, Any]) -> None:
    import webdataset as wds

    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.fromfile(task["rows"], dtype=np.uint16).reshape(-1, task["width"])
    for shard, part in enumerate(np.array_split(rows, SHARDS)):
        with wds.TarWriter(str(folder / f"rows-{shard:02d}.tar")) as out:
            for number, row in enumerate(part):
                out.write({"__key__": f"{shard:02d}-{number:06d}", "bin": row.tobytes()})


class Webdataset:
    def __init__(self, task: dict[str, Any]) -> None:
        import webdataset as wds

        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(task.get("rank", 0)), str(task.get("world", 1))
        rows = wds.WebDataset(
            str(Path(task["folder"]) / f"rows-{{00..{SHARDS - 1:02d}}}.tar"),
            shardshuffle=SHARDS,
            seed=task["seed"],
            nodesplitter=wds.split_by_node,
            empty_check=False,
        )
        rows = rows.shuffle(1_000, seed=task["seed"]).map(lambda sample: np.frombuffer(sample["bin"], dtype=np.uint16))
        self._rows: Any = rows.batched(task["batch"], collation_fn=np.stack, partial=True)
        workers = task.get("workers", 0)
        if workers:
            self._rows = wds.WebLoader(self._rows, batch_size=None, num_workers=workers, persistent_workers=True)
        self._taken = task.get("state") or 0

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._rows, self._taken, None):
            self._taken += 1
            yield batch
        self._taken = 0

    def state(self) -> Any:
        return self._taken


def open_rows(task: dict[str, Any]) -> Webdataset:
    return Webdataset(task)

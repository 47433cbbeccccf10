"""litdata: chunks of tokens, read by its TokensLoader."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np


def _rows_of(bounds: tuple[int, int], file: str, width: int) -> Iterator[Any]:
    import torch

    rows = np.memmap(file, dtype=np.uint16, mode="r").reshape(-1, width)
    for row in rows[bounds[0] : bounds[1]]:
        yield torch.from_numpy(row.copy())


def prepare(task: dict[str, Any]) -> None:
    import litdata

    width = task["width"]
    count = len(np.memmap(task["rows"], dtype=np.uint16, mode="r")) // width
    litdata.optimize(
        partial(_rows_of, file=task["rows"], width=width),
        inputs=[(start, min(start + 1_000, count)) for start in range(0, count, 1_000)],
        output_dir=task["folder"],
        chunk_bytes=task.get("shard_bytes", 1 << 26),
        num_workers=1,
        item_loader=litdata.TokensLoader(block_size=width),
    )


class Litdata:
    def __init__(self, task: dict[str, Any]) -> None:
        import litdata

        rows = litdata.StreamingDataset(
            task["folder"],
            item_loader=litdata.TokensLoader(block_size=task["width"]),
            shuffle=True,
            seed=task["seed"],
            drop_last=False,
        )
        self._loader = litdata.StreamingDataLoader(rows, batch_size=task["batch"], num_workers=task.get("workers", 0))
        if task.get("state"):
            self._loader.load_state_dict(task["state"])

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def state(self) -> Any:
        return self._loader.state_dict()


def open_rows(task: dict[str, Any]) -> Litdata:
    return Litdata(task)

"""grain: ArrayRecord or a memory map as its source, shuffled by its index; ElasticIterator for ranks."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def prepare(task: dict[str, Any]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.fromfile(task["rows"], dtype=np.uint16).reshape(-1, task["width"])
    writer = ArrayRecordWriter(str(folder / "rows.arrayrecord"), "group_size:1,uncompressed")
    for row in rows:
        writer.write(row.tobytes())
    writer.close()


class Mapped:
    """A memory map as a source for random access."""

    def __init__(self, file: str, width: int) -> None:
        self._rows = np.memmap(file, dtype=np.uint16, mode="r").reshape(-1, width)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index]


class Grain:
    def __init__(self, task: dict[str, Any]) -> None:
        import grain
        from grain.experimental import ElasticIterator

        if task.get("source") == "arrayrecord":
            records = grain.sources.ArrayRecordDataSource(task["folder"] + "/rows.arrayrecord")
            rows = grain.MapDataset.source(records).map(lambda data: np.frombuffer(data, dtype=np.uint16))
        else:
            rows = grain.MapDataset.source(Mapped(task["rows"], task["width"]))
        rows = rows.shuffle(seed=task["seed"])
        options = grain.ReadOptions(num_threads=task.get("threads", 0), prefetch_buffer_size=task.get("ahead", 0))
        if task.get("world", 1) > 1:
            shard = grain.sharding.ShardOptions(shard_index=task["rank"], shard_count=task["world"])
            self._rows: Any = ElasticIterator(rows, task["batch"] * task["world"], shard, read_options=options)
        else:
            batches = rows.batch(task["batch"], batch_fn=np.stack)
            self._rows = batches.to_iter_dataset(options)
        self._iterator = iter(self._rows)
        if task.get("state"):
            self._iterator.set_state(task["state"])

    def __iter__(self) -> Iterator[Any]:
        yield from self._iterator
        self._iterator = iter(self._rows)

    def state(self) -> Any:
        return self._iterator.get_state()


def open_rows(task: dict[str, Any]) -> Grain:
    return Grain(task)

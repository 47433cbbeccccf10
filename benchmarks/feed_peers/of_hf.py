"""HF datasets: Arrow files, map-style with a shuffled index or as an iterable; streaming and `tokenizers` for texts."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 12


def prepare(task: dict[str, Any]) -> None:
    import pyarrow as pa
    from datasets import Dataset

    rows = np.fromfile(task["rows"], dtype=np.uint16)
    table = pa.table({"ids": pa.FixedSizeListArray.from_arrays(pa.array(rows), task["width"])})
    Dataset(table).save_to_disk(task["folder"], num_shards=SHARDS)


class MapStyle:
    """Batches by a shuffled index; resumed by skipping, which costs nothing there."""

    def __init__(self, task: dict[str, Any]) -> None:
        from datasets import load_from_disk
        from datasets.distributed import split_dataset_by_node

        self._taken = task.get("state") or 0
        self._batch = task["batch"]
        rows: Any = load_from_disk(task["folder"]).shuffle(seed=task["seed"])
        if task.get("world", 1) > 1:
            rows = split_dataset_by_node(rows, rank=task["rank"], world_size=task["world"])
        self._rows = rows.with_format("numpy")

    def __iter__(self) -> Iterator[Any]:
        rows = self._rows.skip(self._taken * self._batch) if self._taken else self._rows
        for batch in rows.iter(self._batch):
            self._taken += 1
            yield batch["ids"]
        self._taken = 0

    def state(self) -> Any:
        return self._taken


class Iterable:
    """An iterable data set with a shuffle buffer, split by rank; it has a state of its own."""

    def __init__(self, task: dict[str, Any]) -> None:
        from datasets import load_from_disk
        from datasets.distributed import split_dataset_by_node

        rows: Any = load_from_disk(task["folder"]).to_iterable_dataset(num_shards=SHARDS)
        rows = rows.shuffle(seed=task["seed"], buffer_size=1_000)
        rows = split_dataset_by_node(rows, rank=task.get("rank", 0), world_size=task.get("world", 1))
        self._rows = rows.batch(task["batch"]).with_format("numpy")
        if task.get("state"):
            self._rows.load_state_dict(task["state"])

    def __iter__(self) -> Iterator[Any]:
        for batch in self._rows:
            yield batch["ids"]

    def state(self) -> Any:
        return self._rows.state_dict()


def open_rows(task: dict[str, Any]) -> Any:
    return Iterable(task) if task.get("style") == "iterable" else MapStyle(task)


def open_texts(task: dict[str, Any]) -> Iterator[Any]:
    """As people write it: stream, tokenise in batches, concatenate, cut."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(Path(task["tokenizer"]).read_text(encoding="utf-8"))
    end = tokenizer.token_to_id("<|endoftext|>")
    width = task["width"]

    def tokenise(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        encoded = tokenizer.encode_batch(rows["text"], add_special_tokens=False)
        return {"ids": [[*document.ids, end] for document in encoded]}

    def pack(rows: dict[str, list[list[int]]]) -> dict[str, list[Any]]:
        flat = list(chain.from_iterable(rows["ids"]))
        whole = len(flat) // width * width
        return {"ids": [flat[start : start + width] for start in range(0, whole, width)]}

    texts: Any = load_dataset("json", data_files=task["texts"], split="train", streaming=True)
    packed = texts.map(tokenise, batched=True, remove_columns=["text"]).map(pack, batched=True)
    for batch in packed.iter(task["batch"]):  # lists: with a numpy format it would be less than half as fast
        yield np.array(batch["ids"])

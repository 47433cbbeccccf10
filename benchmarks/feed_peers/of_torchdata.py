"""torchdata's StatefulDataLoader over a memory map: a batch is one indexing of it."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Mapped:
    """Rows of a memory map, several at a time."""

    def __init__(self, file: str, width: int) -> None:
        self._rows = np.memmap(file, dtype=np.uint16, mode="r").reshape(-1, width)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> np.ndarray:
        return self._rows[indices]


def _as_tensor(rows: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(rows)


class MappedRows:
    """The same rows one at a time, as most people write it."""

    def __init__(self, file: str, width: int) -> None:
        self._rows = np.memmap(file, dtype=np.uint16, mode="r").reshape(-1, width)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return _as_tensor(self._rows[index].copy())


class Torchdata:
    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        torch.manual_seed(task["seed"])
        alone = task.get("fetch") == "a row"
        rows: Any = (MappedRows if alone else Mapped)(task["rows"], task["width"])
        workers = task.get("workers", 0)
        sampler = None
        if task.get("world", 1) > 1:
            sampler = StatefulDistributedSampler(rows, task["world"], task["rank"], shuffle=True, seed=task["seed"])
        self._loader = StatefulDataLoader(
            rows,
            batch_size=task["batch"],
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=workers,
            collate_fn=None if alone else _as_tensor,  # pyright: ignore[reportArgumentType]
            persistent_workers=workers > 0,
        )
        if task.get("state"):
            self._loader.load_state_dict(task["state"])

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def state(self) -> Any:
        return self._loader.state_dict()


def open_rows(task: dict[str, Any]) -> Torchdata:
    return Torchdata(task)


def open_texts(task: dict[str, Any]) -> Iterator[Any]:
    """An iterable data set that tokenises and packs with `tokenizers`, as nanoGPT's descendants have it."""
    import json

    from tokenizers import Tokenizer
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    tokenizer = Tokenizer.from_str(Path(task["tokenizer"]).read_text(encoding="utf-8"))
    end = tokenizer.token_to_id("<|endoftext|>")

    class Packed(IterableDataset):
        def __iter__(self) -> Iterator[np.ndarray]:
            left: list[int] = []
            texts: list[str] = []
            with Path(task["texts"]).open("rb") as lines:
                for line in lines:
                    texts.append(json.loads(line)["text"])
                    if len(texts) < 256:
                        continue
                    for document in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                        left += [*document.ids, end]
                    texts = []
                    whole = len(left) // task["width"] * task["width"]
                    yield from np.array(left[:whole], dtype=np.int64).reshape(-1, task["width"])
                    left = left[whole:]

    yield from StatefulDataLoader(Packed(), batch_size=task["batch"])

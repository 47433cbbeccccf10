"""A small data set of many chunks and windows, for loaders in this process and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.blocks import ingest
from penstock.feed import DistributedLoader, source_feed, token_cache, train_tokenizer

SIZE = 203
TEXTS = [f"sample {number}: " + "word " * (number * 7 % 23) for number in range(SIZE)]
LENGTH = 16
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


def make_small_store(folder: Path) -> Path:
    raw = folder / "raw.jsonl"
    raw.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    ingest(raw, folder / "store", block_size=40)
    (folder / "tokenizer.json").write_text(TOKENIZER.definition)
    return folder / "store"


class SmallLoader(DistributedLoader):
    """A loader that brings the tests' small chunks along into a spawned process."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        token_cache.CHUNK_BYTES, source_feed.WINDOW_CHUNKS = 400, 3
        self.__dict__.update(state)


def make_loader(store: Path | str, batch_size: int = 7, *, packed: bool = False, **more: Any) -> DistributedLoader:
    if packed:
        more = {"tokenizer": TOKENIZER, "sequence_length": LENGTH, **more}
    return SmallLoader(store, batch_size, 3, **more)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few samples and windows of a few chunks; see `SmallLoader`."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 400)
    monkeypatch.setattr(source_feed, "WINDOW_CHUNKS", 3)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of numpy arrays or of tensors, to compare."""
    return {name: value if isinstance(value, list) else value.tolist() for name, value in batch.items()}

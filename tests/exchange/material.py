"""A small data set whose pages differ, so that learning one is not learning another; and settings to go with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import tomli_w

from pages.making import shard_bytes
from penstock.exchange.settings import ExchangeSettings
from penstock.feed import train_tokenizer
from penstock.pages import make_index, write_index
from penstock.storage import LocalStorage, Storage

ROWS_PER_PAGE = 16
SUBFOLDER = "set"
_PAGES = 160
_WORDS = ["".join(random.Random(number).choices("abcdefghijklmnop", k=4)) for number in range(200)]


def page_texts(page: int) -> list[str]:
    """Rows of a page: a topic of its own, a few words out of many."""
    chance = random.Random(page)
    topic = chance.sample(_WORDS, 6)
    return [" ".join(chance.choices(topic, k=12)) for _ in range(ROWS_PER_PAGE)]


TOKENIZER = train_tokenizer([" ".join(_WORDS)] * 3, vocab_size=420)


def fill_dataset(storage: Storage, subfolder: str = SUBFOLDER) -> None:
    """Write the data set and its index below a prefix."""
    texts = [text for page in range(_PAGES) for text in page_texts(page)]
    half = len(texts) // 2
    storage.put(f"{subfolder}/topics/0000.parquet", shard_bytes(texts[:half]))
    storage.put(f"{subfolder}/topics/0001.parquet", shard_bytes(texts[half:]))


def index_dataset(storage: Storage) -> None:
    """Write the index of a data set that lies at a store's top."""
    write_index([storage], make_index(storage)[0])


def settings_for(run: str = "run", **more: Any) -> dict[str, Any]:
    """Settings of a small run: windows close when all have contributed, however slow the machine is."""
    return {
        "run": run,
        "model": "tiny",
        "tokenizer": "tokenizer.json",
        "dataset_subfolder": SUBFOLDER,
        "miners": ["m0", "m1", "m2", "m3"],
        "seats": 4,
        "window_s": 120.0,
        "grace_s": 2.0,
        "n_pages": 2,
        "num_rows_per_page": ROWS_PER_PAGE,
        "batch_size": 8,
        "sequence_length": 64,
        "inner": "gradient",
        "outer_learning_rate": 0.5,
        "top_k": 512,
        "checkpoint_every": 4,
        "keep_checkpoints": 2,
        **more,
    }


def write_config(folder: Path, **more: Any) -> Path:
    """A TOML file with the settings, and the tokenizer beside it."""
    told = settings_for(**more)
    ExchangeSettings.from_dict(told, "the test's settings")
    storage = LocalStorage(folder)  # which replaces files as a whole: another worker may be reading them
    storage.put("tokenizer.json", TOKENIZER.definition.encode())
    storage.put(f"{told['run']}.toml", tomli_w.dumps(told).encode())
    return folder / f"{told['run']}.toml"

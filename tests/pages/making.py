"""Small Parquet data sets with known texts, and what their pages must come out as, worked out the plain way."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from penstock import R2DatasetLoader
from penstock.feed import train_tokenizer
from penstock.pages import Pages, make_index, write_index
from penstock.storage import Storage, open_storage

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "again"]
TOKENIZER = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=300)
END = TOKENIZER.end_of_text_id
SIZES = {"books": 211, "code": 60, "web": 530}
"""Configs of very different sizes, none of which divides by anything useful."""


def text_of(config: str, row: int) -> str:
    """A row's text, which tells whose it is; some rows are empty, some are long."""
    if row % 41 == 7:
        return ""
    return f"{config} {row}: " + " ".join(WORDS[(row + place) % len(WORDS)] for place in range(row * 7 % 29))


def texts_of(config: str, count: int) -> list[str]:
    return [text_of(config, row) for row in range(count)]


def shard_bytes(texts: Sequence[str | None], *, group_rows: int = 50, **options: Any) -> bytes:
    """A Parquet file with a text column between two others."""
    table = pa.table(
        {
            "id": pa.array([f"id-{row}" for row in range(len(texts))]),
            "text": pa.array(texts, pa.string()),
            "score": pa.array([float(row) for row in range(len(texts))]),
        }
    )
    return table_bytes(table, group_rows=group_rows, **options)


def table_bytes(table: pa.Table, *, group_rows: int = 50, **options: Any) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, row_group_size=group_rows, **options)
    return buffer.getvalue()


def fill(storage: Storage, sizes: dict[str, int] = SIZES, *, shard_rows: int = 90, group_rows: int = 13) -> None:
    """Write a data set: each config in shards of so many rows, and the index."""
    for config, count in sizes.items():
        texts = texts_of(config, count)
        for number, first in enumerate(range(0, count, shard_rows)):
            data = shard_bytes(texts[first : first + shard_rows], group_rows=group_rows)
            storage.put(f"{config}/{number:04d}.parquet", data)
    write_index([storage], make_index(storage)[0])


def make_dataset(folder: Path, sizes: dict[str, int] = SIZES, **more: Any) -> Path:
    fill(open_storage(folder), sizes, **more)
    return folder


def put_shards(folder: Path, shards: dict[str, bytes], *, text_column: str | None = None) -> Path:
    """A data set of these very shards."""
    storage = open_storage(folder)
    for key, data in shards.items():
        storage.put(key, data)
    write_index([storage], make_index(storage, text_column=text_column)[0])
    return folder


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode([text]).ids.tolist()


def documents(
    pages: Iterable[tuple[str, int, str]], rows_per_page: int, sizes: dict[str, int] = SIZES
) -> list[list[int]]:
    """The tokens of each row of some pages, in order."""
    return [
        ids_of(text_of(config, row))
        for config, first, _ in pages
        for row in range(first, min(first + rows_per_page, sizes[config]))
    ]


def packed(rows: list[list[int]], batch_size: int, length: int) -> list[list[list[int]]]:
    """Documents end to end, cut into batches, the last filled up with end of text."""
    flat = [token for row in rows for token in row]
    flat += [END] * (-len(flat) % (batch_size * length))
    return np.array(flat).reshape(-1, batch_size, length).tolist()


def padded(rows: list[list[int]], batch_size: int, length: int) -> list[list[list[int]]]:
    """Each document in rows of its own."""
    cut = [row[at : at + length] for row in rows for at in range(0, len(row), length)]
    cut += [[]] * (-len(cut) % batch_size)
    filled = [row + [END] * (length - len(row)) for row in cut]
    return np.array(filled).reshape(-1, batch_size, length).tolist()


def choose(dataset: Any, n_pages: int = 9, rows: int = 37, *, offset: int = 4, seed: str = "me", **more: Any) -> Pages:
    return R2DatasetLoader.next_pages(offset, n_pages, seed, rows, dataset=dataset, **more)


def loader_of(
    pages: Any, *, batch_size: int = 3, length: int = 32, packing: bool = True, **more: Any
) -> R2DatasetLoader:
    return R2DatasetLoader.create(batch_size, length, pages, more.pop("tokenizer", TOKENIZER), packing, **more)


def batches_of(loader: Iterable[Any]) -> list[list[list[int]]]:
    return [np.asarray(batch).tolist() for batch in loader]


def digest_of(loader: Iterable[Any]) -> str:
    """All batches, as one digest."""
    told = hashlib.sha256()
    for batch in loader:
        told.update(np.asarray(batch).astype("<i8").tobytes())
    return told.hexdigest()

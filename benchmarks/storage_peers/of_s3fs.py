"""s3fs: whole objects; and a page loader as it is usually written over it.

For a page the row group that holds it is read, all of it; rows are tokenised one at a time; pages are loaded by asyncio
tasks under a semaphore, before the first batch is made.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def _file_system(task: dict[str, Any]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        key=task["key"],
        secret=task["secret"],
        client_kwargs={"endpoint_url": task["endpoint"]},
        config_kwargs={"max_pool_connections": 32},
        use_listings_cache=False,
    )


def getter(task: dict[str, Any]) -> Callable[[str], int]:
    files = _file_system(task)
    bucket = task["bucket"]
    return lambda key: len(files.cat_file(f"{bucket}/{key}"))


def tokenizer(task: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(task["tokenizer"])


def pages(task: dict[str, Any], tokenizer: Any) -> Iterator[np.ndarray]:
    import pyarrow.parquet as pq

    files = _file_system(task)
    end = tokenizer.token_to_id("<|endoftext|>")

    def load(shard: str, row_group: int, first: int, rows: int) -> list[int]:
        with files.open(f"{task['bucket']}/{shard}", "rb", block_size=4 << 20) as file:
            table = pq.ParquetFile(file).read_row_group(row_group, columns=["text"], use_threads=False)
        ids: list[int] = []
        for text in table["text"].to_pylist()[first : first + rows]:
            ids += tokenizer.encode(text, add_special_tokens=False).ids
            ids.append(end)
        return ids

    async def load_all() -> list[list[int]]:
        turns = asyncio.Semaphore(task["requests"])

        async def one(page: list[Any]) -> list[int]:
            async with turns:
                return await asyncio.to_thread(load, *page)

        return await asyncio.gather(*(one(page) for page in task["pages"]))

    buffer: list[int] = []
    wanted = task["batch"] * task["width"]
    for ids in asyncio.run(load_all()):
        buffer += ids
        while len(buffer) >= wanted:
            yield np.array(buffer[:wanted]).reshape(task["batch"], task["width"])
            buffer = buffer[wanted:]

"""Making the index files of a data set: one look at each shard's footer, and two small files beside them.

    <data set>/<config>/.../<shard>.parquet     the first folder is the config; shards in none are of config `default`
    <data set>/data/<config>/...                the same: `data` is no config

A shard is of the split that a folder, or the beginning of its name, tells of: train, valid (validation, val, dev) or
test; else of train. Shards are numbered by name, so that the index is the same whoever makes it, and whenever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from penstock.errors import ConfigError, SourceError
from penstock.pages.catalog import ALL_OF_THEM, METADATA_KEY, SIZES_KEY, Catalog, parse_catalog, split_name
from penstock.pages.dataset import PagedDataset, root_of
from penstock.pages.footers import column_facts
from penstock.storage import ObjectInfo, ReadableStorage, Storage

_SUFFIX = ".parquet"
_SPLITS = ("train", "valid", "test")
_WORD = re.compile(r"[a-z]+")
_DATA = "data"


def make_index(
    storage: ReadableStorage,
    *,
    text_column: str | None = None,
    max_requests: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], Catalog]:
    """Look at every shard, and tell what `_shard_sizes.json` is to hold. Writes nothing.

    Args:
        storage: The data set's folder.
        text_column: The column that every shard must have; else one with a usual name.
        max_requests: How many shards are looked at together.
        on_progress: Gets (shards done, shards in all).
    """
    dataset = PagedDataset(storage)
    found = [info for info in storage.list() if _is_shard(info.key)]
    if not found:
        raise SourceError(f"{storage.url} has no {_SUFFIX} files below it: expected <config>/<shard>.parquet; check it")
    done = 0

    def look(info: ObjectInfo) -> tuple[int, int]:
        nonlocal done
        head = storage.head(info.key)
        metadata, _ = dataset.footer(head)
        what = f"{storage.url}/{info.key}"
        rows = column_facts(metadata, text_column, head.size_bytes, what).num_rows
        done += 1
        if on_progress is not None:
            on_progress(done, len(found))
        return rows, head.size_bytes

    if max_requests < 1:
        raise ConfigError(f"max_requests={max_requests} asks for nothing: expected 1 or more")
    with ThreadPoolExecutor(max_requests) as pool:
        facts = list(pool.map(look, found))
    configs: dict[str, dict[str, Any]] = {}
    for info, (rows, size) in zip(found, facts, strict=True):
        config, split = _place(info.key)
        entry = configs.setdefault(config, {"total_rows": 0, "split": "train", "relative": True, "shards": []})
        entry["total_rows"] += rows
        entry["shards"].append({"path": info.key, "num_rows": rows, "size_bytes": size, "split": split})
    for entry in configs.values():
        _tell_split_once(entry)
    sizes = dict(sorted(configs.items()))
    catalog = parse_catalog(_dumped(sizes), None, where=storage.url, root=root_of(storage))
    return sizes, catalog


def write_index(storages: Sequence[Storage], sizes: dict[str, Any]) -> bool:
    """Write the index files to each of several stores with the same data; says whether any was not there already."""
    import yaml

    wanted = {
        METADATA_KEY: yaml.safe_dump({"configs": [{"config_name": name} for name in sizes]}, sort_keys=False).encode(),
        SIZES_KEY: _dumped(sizes),  # last: it is what the data set is read by
    }
    changed = False
    for storage in storages:
        for key, data in wanted.items():
            if not storage.exists(key) or storage.get(key) != data:
                storage.put(key, data)
                changed = True
    return changed


def _dumped(sizes: dict[str, Any]) -> bytes:
    return orjson.dumps(sizes, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _is_shard(key: str) -> bool:
    return key.endswith(_SUFFIX) and not any(part.startswith((".", "_")) for part in key.split("/"))


def _place(key: str) -> tuple[str, str]:
    """A shard's config and split, by its path."""
    *folders, name = key.split("/")
    if folders and folders[0] == _DATA:
        folders = folders[1:]
    config = folders[0] if folders and _split_of(folders[0]) is None else ALL_OF_THEM
    split = next((split for part in [*folders, name] if (split := _split_of(part))), "train")
    return config, split


def _split_of(part: str) -> str | None:
    """The split that a folder's name, or the first word of a file's, tells of."""
    word = _WORD.match(part.lower())
    name = split_name(word.group()) if word is not None else ""
    rest = part[word.end() :] if word is not None else ""
    return name if name in _SPLITS and not rest[:1].isalpha() else None


def _tell_split_once(entry: dict[str, Any]) -> None:
    """A split that all shards of a config have is told there, and not by each of them."""
    splits = {shard["split"] for shard in entry["shards"]}
    if len(splits) == 1:
        entry["split"] = splits.pop()
        for shard in entry["shards"]:
            del shard["split"]

"""What a Parquet data set holds: configs, their splits, their shards in order, and how many rows each has.

    _shard_sizes.json    {config: {"total_rows": 3, "split": "train", "shards": [{"path": ..., "num_rows": 3}, ...]}}
    _metadata.yaml       configs: [{config_name: ...}, ...]: which of them are meant; all, where there is no such file

A shard may name a ``split`` of its own, and its ``size_bytes``. Paths are relative to the data set's folder, for sure
where a config says ``"relative": true``, as `penstock pages index` writes it; else they may all begin with the bucket's
name, or with the names of folders above, if that is where the shards are. Order is that of the file: rows are numbered
by it. What others have written is checked before it is used: names, counts, no shard twice.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import orjson

from penstock.errors import ConfigError, SourceError
from penstock.plans.pages import PageNumbering

_log = logging.getLogger(__name__)

SIZES_KEY = "_shard_sizes.json"
METADATA_KEY = "_metadata.yaml"
LARGEST_METADATA_BYTES = 256 << 20
ALL_OF_THEM = "default"
"""What a config is called that stands for all the others together."""
_SPLITS = {"validation": "valid", "val": "valid", "dev": "valid", "eval": "valid", "training": "train"}
_MOST_ROWS = 1 << 53


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file."""

    path: str
    num_rows: int
    size_bytes: int | None = None


@dataclass(frozen=True)
class Part:
    """One config of one split: rows numbered from 0, shard after shard."""

    config: str
    split: str
    shards: tuple[Shard, ...]

    @cached_property
    def starts(self) -> np.ndarray:
        """The number of each shard's first row, and how many rows there are."""
        return np.concatenate([[0], np.cumsum([shard.num_rows for shard in self.shards], dtype=np.int64)])

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def pieces(self, first: int, last: int) -> list[tuple[Shard, int, int]]:
        """The shards that hold rows ``[first, last)``, each with its own rows of them; empty shards are passed over."""
        place = int(np.searchsorted(self.starts, first, side="right")) - 1
        found = []
        while first < last:
            start, stop = int(self.starts[place]), int(self.starts[place + 1])
            if first < stop:
                found.append((self.shards[place], first - start, min(last, stop) - start))
                first = min(last, stop)
            place += 1
        return found


class Catalog:
    """All parts of a data set. Holds what the index files say; no I/O; pickles."""

    def __init__(self, parts: Sequence[Part], where: str) -> None:
        self.where = where
        self.parts = tuple(sorted(parts, key=lambda part: (part.split, part.config)))
        self._by_name = {(part.config, part.split): part for part in self.parts}
        self._by_split: dict[str, list[Part]] = {}
        self._places: dict[tuple[str, str], int] = {}
        for part in self.parts:
            same = self._by_split.setdefault(part.split, [])
            self._places[part.config, part.split] = len(same)
            same.append(part)
        self._numberings: dict[tuple[str, int], PageNumbering] = {}

    @cached_property
    def dataset_id(self) -> str:
        """Names the data set by its configs, splits, shards and their rows: equal means the same pages."""
        told = orjson.dumps(
            [
                [part.config, part.split, [[s.path, s.num_rows, s.size_bytes] for s in part.shards]]
                for part in self.parts
            ]
        )
        return "sha256:" + hashlib.sha256(b"penstock pages 1\n" + told).hexdigest()

    @property
    def splits(self) -> list[str]:
        return sorted(self._by_split)

    def parts_of(self, split: str) -> list[Part]:
        """The configs of a split, in the order in which their pages are numbered."""
        found = self._by_split.get(split_name(split))
        if not found:
            raise ConfigError(f"{self.where} has no split {split!r}: it has {', '.join(self.splits)}; name one of them")
        return found

    def part(self, config: str, split: str) -> Part:
        found = self._by_name.get((config, split_name(split)))
        if found is None:
            known = [f"{part.config}/{part.split}" for part in self.parts]
            listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
            raise ConfigError(f"{self.where} has no config {config!r} with a split {split!r}: it has {listed}")
        return found

    def place_of(self, config: str, split: str) -> int:
        """A config's place among those of its split."""
        return self._places[config, split]

    def numbering(self, split: str, rows_per_page: int) -> PageNumbering:
        """The pages of a split."""
        key = split_name(split), rows_per_page
        found = self._numberings.get(key)
        if found is None:
            found = PageNumbering([part.num_rows for part in self.parts_of(split)], rows_per_page)
            self._numberings[key] = found
        return found

    def as_dict(self) -> dict[str, Any]:
        """A summary."""
        return {
            "dataset_id": self.dataset_id,
            "configs": [
                {
                    "config": part.config,
                    "split": part.split,
                    "shards": len(part.shards),
                    "rows": part.num_rows,
                    "size_bytes": sum(shard.size_bytes or 0 for shard in part.shards),
                }
                for part in self.parts
            ],
            "rows": sum(part.num_rows for part in self.parts),
        }


def split_name(split: str) -> str:
    """A split by the name it goes by here: train, valid, test."""
    if not isinstance(split, str):  # pyright: ignore[reportUnnecessaryIsInstance] - whatever a user hands in
        raise ConfigError(f"split={split!r} is no name: expected train, valid, test or another that the data set has")
    return _SPLITS.get(split.lower(), split.lower())


def parse_catalog(
    sizes: bytes,
    metadata: bytes | None,
    *,
    where: str,
    root: Sequence[str],
    exists: Callable[[str], bool] = lambda _: False,
) -> Catalog:
    """Make a catalog of the two files.

    Args:
        sizes: The content of `_shard_sizes.json`.
        metadata: That of `_metadata.yaml`; None where there is none.
        where: The data set, for messages.
        root: The names of the folders it lies in, the bucket's first, as paths in the file may begin with them.
        exists: Whether there is a shard at a path below the data set's folder. Asked only where that is in doubt.
    """
    told = f"{where}/{SIZES_KEY}"
    try:
        found = orjson.loads(sizes)
    except orjson.JSONDecodeError as error:
        raise SourceError(f"{told} is not JSON: {error}: {_remedy(where)}") from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise SourceError(
            f"{told} is not understood: expected an object of configs, each with its shards: {_remedy(where)}"
        )
    wanted = _meant(metadata, where)
    if wanted is not None:
        left_out = [name for name in found if name not in wanted]
        if left_out:
            _log.warning(
                "%s: %s are left out, since %s does not name them", told, ", ".join(map(repr, left_out)), METADATA_KEY
            )
        found = {name: entry for name, entry in found.items() if name in wanted}
    cut = _leading(found, root, exists)
    parts = [part for name, entry in found.items() for part in _parts(name, entry, told, where, cut)]
    parts = _without_union(parts)
    _refuse_twice(parts, told)
    rows = sum(shard.num_rows for part in parts for shard in part.shards)
    if rows > _MOST_ROWS:
        raise SourceError(f"{told} tells of {rows} rows: expected {_MOST_ROWS} or fewer: {_remedy(where)}")
    if not rows:
        raise SourceError(f"{told} tells of no rows: expected shards with rows in them: {_remedy(where)}")
    return Catalog(parts, where)


def _meant(metadata: bytes | None, where: str) -> set[str] | None:
    """The configs that `_metadata.yaml` names; None where it names none."""
    if metadata is None:
        return None
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = yaml.load(metadata, Loader=loader)  # the safe one
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date or number that is none is a ValueError
        told = " ".join(str(error).split())
        raise SourceError(f"{where}/{METADATA_KEY} is not YAML: {told}: {_remedy(where)}") from error
    configs = found.get("configs") if isinstance(found, dict) else None
    if configs is None:
        return None
    names = [entry.get("config_name") for entry in configs if isinstance(entry, dict)] if _is_list(configs) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SourceError(
            f"{where}/{METADATA_KEY} is not understood: expected a list of configs, each with a config_name: "
            f"{_remedy(where)}"
        )
    return {str(name) for name in names}


def _leading(found: dict[str, Any], root: Sequence[str], exists: Callable[[str], bool]) -> int:
    """How many names of folders all paths begin with that the data set's own folder has as well."""
    if all(entry.get("relative") is True for entry in found.values()):
        return 0
    shards = [shard for entry in found.values() if _is_list(entry.get("shards")) for shard in entry["shards"]]
    paths = [
        _names(shard["path"]) for shard in shards if isinstance(shard, dict) and isinstance(shard.get("path"), str)
    ]
    shortest = min(map(len, paths), default=0)
    ways = [
        len(root) - begin
        for begin in range(len(root))
        if len(root) - begin < shortest and all(path[: len(root) - begin] == list(root[begin:]) for path in paths)
    ]
    if root:  # the same folder in another bucket
        ways += [place + 1 for place in range(shortest - 1) if all(path[place] == root[-1] for path in paths)]
    if not ways:
        return 0
    # A folder may hold one of its own name: what is there decides.
    return next((cut for cut in (0, *ways) if exists("/".join(paths[0][cut:]))), ways[0])


def _names(path: str) -> list[str]:
    return [part for part in path.partition("://")[2 if "://" in path else 0].split("/") if part not in ("", ".")]


def _parts(name: str, entry: Mapping[str, Any], told: str, where: str, cut: int) -> list[Part]:
    shards, split = entry.get("shards"), entry.get("split", "train")
    if not _is_list(shards):
        raise SourceError(f"{told}: config {name!r} has no list of shards: {_remedy(where)}")
    if not isinstance(split, str) or not split:
        raise SourceError(
            f"{told}: config {name!r} has split={split!r}, a split that is no name: expected train, valid or test: "
            f"{_remedy(where)}"
        )
    by_split: dict[str, list[Shard]] = {}
    for number, shard in enumerate(shards):
        made, own = _shard(shard, f"{told}: shard {number} of config {name!r}", where, cut)
        by_split.setdefault(split_name(own or split), []).append(made)
    total, counted = entry.get("total_rows"), sum(shard.num_rows for some in by_split.values() for shard in some)
    if total is not None and not _is_count(total):
        raise SourceError(f"{told}: config {name!r} has total_rows={total!r}: expected a count: {_remedy(where)}")
    if total is not None and total != counted:
        raise SourceError(
            f"{told}: config {name!r} is said to have {total} rows, its shards have {counted}: {_remedy(where)}"
        )
    return [Part(name, found, tuple(of_split)) for found, of_split in by_split.items()]


def _shard(entry: Any, told: str, where: str, cut: int) -> tuple[Shard, str | None]:
    if not isinstance(entry, dict):
        raise SourceError(f"{told} is not understood: expected an object: {_remedy(where)}")
    path, rows, size, split = (entry.get(name) for name in ("path", "num_rows", "size_bytes", "split"))
    if not isinstance(path, str) or not _is_count(rows) or not (size is None or _is_count(size)):
        raise SourceError(
            f"{told} has path={path!r}, num_rows={rows!r}, size_bytes={size!r}: expected a name and counts: "
            f"{_remedy(where)}"
        )
    if split is not None and (not isinstance(split, str) or not split):
        raise SourceError(f"{told} has split={split!r}: expected a name: {_remedy(where)}")
    return Shard(_relative(path, told, cut), rows, size), split


def _relative(path: str, told: str, cut: int) -> str:
    """A shard's path below the data set's folder."""
    parts = _names(path)
    if not parts or ".." in parts:
        raise SourceError(f"{told} has path={path!r}: expected a path below the data set's folder")
    return "/".join(parts[cut:])


def _without_union(parts: list[Part]) -> list[Part]:
    """Without the config that stands for all others, where its shards are theirs."""
    others = {shard.path for part in parts if part.config != ALL_OF_THEM for shard in part.shards}
    return [
        part
        for part in parts
        if part.config != ALL_OF_THEM or not others or not all(shard.path in others for shard in part.shards)
    ]


def _refuse_twice(parts: list[Part], told: str) -> None:
    seen: dict[str, str] = {}
    for part in parts:
        for shard in part.shards:
            here = f"{part.config}/{part.split}"
            if shard.path in seen:
                raise SourceError(
                    f"{told}: {shard.path} is in {seen[shard.path]} and in {here}, so its rows would be read twice: "
                    "leave one of them out"
                )
            seen[shard.path] = here


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_ROWS


def _remedy(where: str) -> str:
    return f"write it anew with `penstock pages index {where}`"

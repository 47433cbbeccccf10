"""From what a user names to a data set: the environment's buckets, a URL, a folder, a store."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.pages.dataset import PagedDataset
from penstock.storage import ReadableStorage, load_bucket_secrets, open_storage

DatasetLike = str | os.PathLike[str] | ReadableStorage | PagedDataset
_KEPT = 8
_VARIABLES = ("AWS_", "R2_", "GOOGLE_", "AZURE_", "BUCKET_SECRETS")
_lock = threading.Lock()
_kept: OrderedDict[tuple[str, bytes], PagedDataset] = OrderedDict()


def _renew() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def open_dataset(dataset: DatasetLike | None, *, subfolder: str, region: str) -> PagedDataset:
    """The data set that is meant. One that was opened before in this process is the same object, with its connections
    and all that is known of its shards, as long as the environment's credentials are the same. Does no I/O.

    Args:
        dataset: A URL, a folder, a store, one that is open; None for the environment's data set bucket or buckets.
        subfolder: Where in the environment's buckets it is.
        region: What requests to R2 are signed for, there.
    """
    if isinstance(dataset, PagedDataset):
        return dataset
    if dataset is None:
        buckets = load_bucket_secrets()["dataset"]
        return _once(PagedDataset(buckets.storage("read", prefix=subfolder, r2_region=region)))
    if isinstance(dataset, str | os.PathLike):
        return _once(PagedDataset(open_storage(dataset)))
    if not all(hasattr(dataset, name) for name in ("get_range", "head", "url")):
        raise ConfigError(f"dataset={dataset!r} is no place of a data set: expected a URL, a folder or a store")
    return PagedDataset(cast(ReadableStorage, dataset))


def _once(opened: PagedDataset) -> PagedDataset:
    key = opened.told, _credentials()
    with _lock:
        found = _kept.setdefault(key, opened)
        _kept.move_to_end(key)
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)
        return found


def _credentials() -> bytes:
    """What the environment says of buckets, as a digest: nothing of it is remembered."""
    told = hashlib.blake2b(f"{os.getpid()}\n".encode(), digest_size=16)
    for name in sorted(name for name in os.environ if name.startswith(_VARIABLES)):
        told.update(f"{name}={os.environ[name]}\n".encode(errors="surrogateescape"))
    return told.digest()


def write_storages(dataset: str | None, *, subfolder: str, region: str) -> list[Any]:
    """The stores to write a data set's index to: the one named, or each of the environment's buckets."""
    if dataset is not None:
        return [open_storage(dataset)]
    bucket = load_bucket_secrets()["dataset"]
    each = bucket.get("multiple", [bucket])
    return [one.storage("write", prefix=subfolder, r2_region=region) for one in each]

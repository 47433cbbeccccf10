"""Where block stores are: told from raw sources, and the cache folder of those that are made on the way."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.blocks.manifest import MANIFEST_KEY
from penstock.errors import BlockStoreError, ConfigError
from penstock.storage import LocalStorage, Storage, open_storage

if TYPE_CHECKING:
    from penstock.storage.disk_cache import DiskCache

CACHE_VARIABLE = "PENSTOCK_CACHE"
DISK_CACHE_VARIABLE = "PENSTOCK_DISK_CACHE_BYTES"
DISK_CACHE_BYTES = 16 << 30
"""How much disk the blocks of remote stores may take on a machine, unless told otherwise."""


def cache_folder() -> Path:
    """Where raw data sets are kept as blocks: PENSTOCK_CACHE, else penstock in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penstock")


def disk_cache_for(path: str, disk_cache_bytes: int | None) -> DiskCache | None:
    """The disk cache for a store at `path`; None where that is local, or where a budget of 0 turns the cache off.

    Args:
        path: Where the store is.
        disk_cache_bytes: The budget; PENSTOCK_DISK_CACHE_BYTES where not given, else `DISK_CACHE_BYTES`.
    """
    if not is_remote(path):
        return None
    budget = disk_cache_bytes
    if budget is None:
        told = os.environ.get(DISK_CACHE_VARIABLE, "").strip() or str(DISK_CACHE_BYTES)
        if not (told.isascii() and told.isdigit()):
            raise ConfigError(f"{DISK_CACHE_VARIABLE}={told!r} is no size: expected a number of bytes, 0 for no cache")
        budget = int(told)
    if not budget:
        return None
    from penstock.storage.disk_cache import DiskCache

    return DiskCache(cache_folder().expanduser().absolute() / "objects", budget)


def is_remote(path: str) -> bool:
    """Whether a path is a URL of something that is not on this machine's disks."""
    return "://" in path and not path.startswith("file://")


def is_block_store(path: str) -> bool:
    """Whether a path is a block store, finished or being written; refuses what is left of one."""
    if path.startswith("hf://"):
        return False
    if is_remote(path) and glob.has_magic(path):
        return False
    storage = open_storage(path)
    if is_remote(path):
        if storage.exists(MANIFEST_KEY) or _is_begun(storage):
            return True
    elif not isinstance(storage, LocalStorage) or not storage.root.is_dir():
        return False
    elif storage.exists(MANIFEST_KEY) or _is_begun(storage):
        return True
    if storage.exists("blocks/block_00000.idx"):
        raise BlockStoreError(
            f"{path} has blocks and neither manifest nor journal: restore block_manifest.json, or ingest again"
        )
    return False


def _is_begun(storage: Storage) -> bool:
    from penstock.blocks.journal import Journal  # here, because opening a complete store must not wait for it

    return Journal(storage).header() is not None

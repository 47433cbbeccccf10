"""Where block stores are: told from raw sources, and the cache folder of those that are made on the way."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.blocks.journal import Journal
from penstock.blocks.manifest import MANIFEST_KEY
from penstock.errors import BlockStoreError
from penstock.storage import LocalStorage, open_storage

CACHE_VARIABLE = "PENSTOCK_CACHE"


def cache_folder() -> Path:
    """Where raw data sets are kept as blocks: PENSTOCK_CACHE, else penstock in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penstock")


def is_block_store(path: str) -> bool:
    """Whether a path is a block store, finished or being written; refuses what is left of one."""
    if "://" in path and not path.startswith("file://"):
        return not path.startswith("hf://")
    storage = open_storage(path)
    if not isinstance(storage, LocalStorage) or not storage.root.is_dir():
        return False
    if storage.exists(MANIFEST_KEY) or Journal(storage).header() is not None:
        return True
    if storage.exists("blocks/block_00000.idx"):
        raise BlockStoreError(
            f"{path} has blocks and neither manifest nor journal: restore block_manifest.json, or ingest again"
        )
    return False

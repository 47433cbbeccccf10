"""Bytes, by key: where everything Penstock stores is read and written.

    caller ── key ──► Storage ──► local folder           (objects are files; temp file, fsync, rename)
                                  object store           (same contract, same tests)
                                  Hub repository         (`ReadableStorage`: its files at one commit)

The one contract is `Storage` in `base.py`, with `ReadableStorage` as the half that sources need; `open_storage` picks
the backend by URL. Below: nothing but `faults` and
`errors`. Above: sources read through it, blocks and checkpoints live on it. Errors are translated here, once: no caller
sees an `OSError`. Retrying belongs here and nowhere else.
"""

from typing import TYPE_CHECKING

from penstock.exports import opening_lazily

if TYPE_CHECKING:
    from penstock.storage.base import ObjectInfo, ObjectWriter, ReadableStorage, Storage
    from penstock.storage.hub import HubStorage, is_offline, open_hub_repository, search_hub
    from penstock.storage.local import LocalStorage
    from penstock.storage.opening import open_storage

__all__ = [
    "HubStorage",
    "LocalStorage",
    "ObjectInfo",
    "ObjectWriter",
    "ReadableStorage",
    "Storage",
    "is_offline",
    "open_hub_repository",
    "open_storage",
    "search_hub",
]

__getattr__ = opening_lazily(
    __name__,
    {
        "HubStorage": "hub",
        "LocalStorage": "local",
        "ObjectInfo": "base",
        "ObjectWriter": "base",
        "ReadableStorage": "base",
        "Storage": "base",
        "is_offline": "hub",
        "open_hub_repository": "hub",
        "open_storage": "opening",
        "search_hub": "hub",
    },
)

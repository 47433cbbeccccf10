"""Bytes, by key: where everything Penstock stores is read and written.

    caller ── key ──► Storage ──► LocalStorage     local folder: objects are files; temp file, fsync, rename
                                  ObjectStorage    S3, R2, GCS, Azure, HTTP: same contract, same tests
                  ReadableStorage HubStorage       a Hub repository's files at one commit
                                  EndpointStorage  one data set on several endpoints: round robin, failover

    ObjectStorage ── retry.py ──► client.py (one request, tried once) ──► obstore ──► answers.py (what it meant)

The one contract is `Storage` in `base.py`, with `ReadableStorage` as the half that sources need; `open_storage` picks
the backend by URL, `load_bucket_secrets` finds buckets in the environment. Below: nothing but `faults` and
`errors`. Above: sources read through it, blocks and checkpoints live on it. Errors are translated here, once: no caller
sees an `OSError`. Retrying belongs here and nowhere else. Nothing here imports obstore before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.storage.base import ObjectInfo, ObjectWriter, ReadableStorage, Storage
from penstock.storage.hub import HubStorage, open_hub_repository, search_hub
from penstock.storage.local import LocalStorage
from penstock.storage.opening import open_storage

if TYPE_CHECKING:
    from penstock.storage.buckets import load_bucket_secrets
    from penstock.storage.endpoints import EndpointStorage
    from penstock.storage.objects import ObjectStorage

__all__ = [
    "EndpointStorage",
    "HubStorage",
    "LocalStorage",
    "ObjectInfo",
    "ObjectStorage",
    "ObjectWriter",
    "ReadableStorage",
    "Storage",
    "load_bucket_secrets",
    "open_hub_repository",
    "open_storage",
    "search_hub",
]

_HOMES = {
    "EndpointStorage": "penstock.storage.endpoints",
    "ObjectStorage": "penstock.storage.objects",
    "load_bucket_secrets": "penstock.storage.buckets",
}
"""What opens on first use: whoever stays local does not wait for it."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.storage' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

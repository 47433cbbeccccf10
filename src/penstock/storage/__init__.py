"""Bytes, by key: where everything Penstock stores is read and written.

    caller ── key ──► Storage ──► LocalStorage     local folder: objects are files; temp file, fsync, rename
                                  ObjectStorage    S3, R2, GCS, Azure, HTTP: same contract, same tests
                  ReadableStorage PinnedStorage    files of an object store, each at the version first seen
                                  HubStorage       a Hub repository's files at one commit
                                  EndpointStorage  one data set on several endpoints: failover, slow ones overtaken

    DiskCache: pieces of remote objects on this machine's disk, for whoever reads an object store again and again

    ObjectStorage ── retry.py ──► client.py (one request, tried once) ──► obstore ──► answers.py (what it meant)

The one contract is `Storage` in `base.py`, with `ReadableStorage` as the half that sources need; `open_storage` picks
the backend by URL, `load_bucket_secrets` finds buckets in the environment. Below: nothing but `faults` and
`errors`. Above: sources read through it, blocks and checkpoints live on it. Errors are translated here, once: no caller
sees an `OSError`. Retrying belongs here and nowhere else. Nothing here imports obstore before it is used.
"""

from typing import TYPE_CHECKING

from penstock.exports import opening_lazily

if TYPE_CHECKING:
    from penstock.storage.base import ObjectInfo, ObjectWriter, ReadableStorage, StillHeld, Storage
    from penstock.storage.buckets import load_bucket_secrets
    from penstock.storage.endpoints import EndpointStorage
    from penstock.storage.hub import HubStorage, is_offline, open_hub_repository, search_hub
    from penstock.storage.local import LocalStorage
    from penstock.storage.objects import ObjectStorage
    from penstock.storage.opening import open_storage

__all__ = [
    "EndpointStorage",
    "HubStorage",
    "LocalStorage",
    "ObjectInfo",
    "ObjectStorage",
    "ObjectWriter",
    "ReadableStorage",
    "StillHeld",
    "Storage",
    "is_offline",
    "load_bucket_secrets",
    "open_hub_repository",
    "open_storage",
    "search_hub",
]

__getattr__ = opening_lazily(
    __name__,
    {
        "EndpointStorage": "endpoints",
        "HubStorage": "hub",
        "LocalStorage": "local",
        "ObjectInfo": "base",
        "ObjectStorage": "objects",
        "ObjectWriter": "base",
        "ReadableStorage": "base",
        "StillHeld": "base",
        "Storage": "base",
        "is_offline": "hub",
        "load_bucket_secrets": "buckets",
        "open_hub_repository": "hub",
        "open_storage": "opening",
        "search_hub": "hub",
    },
)

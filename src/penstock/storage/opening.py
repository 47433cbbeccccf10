"""From a URL or a path to a storage backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.storage.base import Storage
from penstock.storage.local import LocalStorage

if TYPE_CHECKING:
    from penstock.storage.address import Options


def open_storage(url: str | os.PathLike[str], options: Options | None = None) -> Storage:
    """Choose the backend for a path, ``file://``, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``https://``.

    Does no I/O. `options` are those of an object store, see `StoreAddress`; what they leave out comes from the
    environment when the store is first used.
    """
    text = os.fspath(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        from penstock.storage.objects import ObjectStorage

        return ObjectStorage.from_url(text, options)
    if options:
        raise ConfigError(f"{text} is a local folder, which has no options: got {', '.join(sorted(options))}")
    if not text:
        raise ConfigError("storage path is empty: expected a folder")
    path = Path(text)
    return LocalStorage(path.expanduser() if text.startswith("~/") else path)

"""From a URL or a path to a storage backend."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import ConfigError
from penstock.storage.base import Storage
from penstock.storage.local import LocalStorage


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Choose the backend for a path, a ``file://`` URL, or another scheme. Does no I/O."""
    text = os.fspath(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        scheme = text.split("://", 1)[0]
        raise ConfigError(f"storage scheme {scheme}:// is not supported: expected a local path or file://")
    if not text:
        raise ConfigError("storage path is empty: expected a folder")
    path = Path(text)
    return LocalStorage(path.expanduser() if text.startswith("~/") else path)

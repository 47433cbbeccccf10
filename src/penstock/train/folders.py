"""Folders that are to be written: refused before any work is done for them."""

from __future__ import annotations

import os

from penstock.errors import ConfigError
from penstock.storage import LocalStorage, Storage


def writable_folder(storage: Storage, *, what: str, remedy: str) -> LocalStorage:
    """A local folder, made where it is not there.

    Args:
        storage: The folder.
        what: What it is to whoever named it.
        remedy: How to name another.
    """
    if not isinstance(storage, LocalStorage):
        raise ConfigError(f"the {what} {storage.url} is not local: expected a path")
    try:
        storage.root.mkdir(parents=True, exist_ok=True)
        writable = os.access(storage.root, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"the {what} {storage.url} cannot be made: {error.strerror}: {remedy}") from error
    if not writable:
        raise ConfigError(f"the {what} {storage.url} cannot be written: {remedy}, or give it to yourself")
    return storage

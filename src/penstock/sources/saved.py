"""Folders that Hugging Face `datasets` saved: which files they hold, in which order."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.errors import SourceError, StorageError
from penstock.storage import ReadableStorage


def saved_dataset_files(storage: ReadableStorage) -> list[str] | None:
    """Arrow files of a data set written by ``save_to_disk``, in its order; None where the folder is none."""
    folder = storage.url
    if storage.exists("dataset_dict.json"):
        names = _read(storage, "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not names:
            raise SourceError(f"{folder} holds a data set without splits: there is nothing to read")
        listed = ", ".join(map(str, names))
        raise SourceError(f"{folder} holds several splits ({listed}): name one, such as {folder}/{names[0]}")
    if not (storage.exists("state.json") and storage.exists("dataset_info.json")):
        return None
    state = f"{folder}/state.json"
    told = _read(storage, "state.json")
    if any(key.startswith("_indices") and value for key, value in told.items()):
        raise SourceError(f"{state} selects rows by an index, as old versions did: save the data set again")
    try:
        return [str(entry["filename"]) for entry in told["_data_files"]]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{state} does not list the data set's files: save the data set again") from error


def _read(storage: ReadableStorage, key: str) -> dict[str, Any]:
    path = f"{storage.url}/{key}"
    try:
        told = orjson.loads(storage.get(key))
    except (StorageError, orjson.JSONDecodeError) as error:
        raise SourceError(f"{path} cannot be read: {error}: save the data set again") from error
    if not isinstance(told, dict):
        raise SourceError(f"{path} holds no JSON object: save the data set again")
    return told

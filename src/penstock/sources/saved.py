"""Folders that Hugging Face `datasets` saved: which files they hold, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from penstock.errors import SourceError


def saved_dataset_files(folder: Path) -> list[str] | None:
    """Arrow files of a data set written by ``save_to_disk``, in its order; None where the folder is none."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _read(splits).get("splits")
        if not isinstance(names, list) or not names:
            raise SourceError(f"{folder} holds a data set without splits: there is nothing to read")
        listed = ", ".join(map(str, names))
        raise SourceError(f"{folder} holds several splits ({listed}): name one, such as {folder}/{names[0]}")
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    told = _read(state)
    if any(key.startswith("_indices") and value for key, value in told.items()):
        raise SourceError(f"{state} selects rows by an index, as old versions did: save the data set again")
    try:
        return [str(entry["filename"]) for entry in told["_data_files"]]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{state} does not list the data set's files: save the data set again") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        told = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SourceError(f"{path} cannot be read: {error}: save the data set again") from error
    if not isinstance(told, dict):
        raise SourceError(f"{path} holds no JSON object: save the data set again")
    return told

"""Data sets of the Hugging Face Hub as sources: pinned to a commit, read file by file."""

from __future__ import annotations

from penstock.errors import ObjectNotFound, SourceError, StorageError
from penstock.sources.archives import is_hidden
from penstock.sources.base import Source
from penstock.sources.files import FileSource
from penstock.sources.formats import ReadOptions, can_read
from penstock.sources.hub_files import choose_files
from penstock.sources.hub_spec import HubSpec, parse_hub_spec
from penstock.sources.modalities import refuse_untrainable
from penstock.sources.patterns import matches
from penstock.sources.streamed import StreamedSource
from penstock.storage import HubStorage, LocalStorage, ReadableStorage, open_hub_repository


def open_hub(text: str, *, options: ReadOptions | None, pinned: str | None, want_text: bool) -> Source:
    """Open what ``hf://...`` names.

    Args:
        text: See `hub_spec`.
        options: How files are read.
        pinned: The commit an ingest began with, which it must end with; else the newest is taken and pinned.
        want_text: Whether the rows are to be trained on; data sets of other modalities are then refused.
    """
    spec = parse_hub_spec(text)
    storage = _repository(spec, pinned)
    if want_text and isinstance(storage, HubStorage):
        refuse_untrainable(spec.text, storage.tags)
    if spec.pattern is not None:
        keys = _named(storage, spec.pattern)
        if not keys:
            raise SourceError(f"{text}: no file of {storage.url} matches {spec.pattern!r}")
        return FileSource(spec=text, name=spec.stem, storage=storage, keys=keys, options=options)
    try:
        chosen = choose_files(storage, spec.name, spec.first, spec.split)
    except StorageError as error:
        raise SourceError(f"{text}: {error}") from error
    if chosen.is_plain:
        return FileSource(spec=text, name=spec.stem, storage=storage, keys=chosen.keys, options=options)
    return StreamedSource(spec=text, name=spec.stem, storage=storage, chosen=chosen)


def _repository(spec: HubSpec, pinned: str | None) -> ReadableStorage:
    folder = spec.folder
    if folder is not None:
        if not folder.is_dir():
            raise SourceError(f"{spec.text}: there is no folder {folder}: expected one laid out like a Hub repository")
        return LocalStorage(folder.resolve())
    try:
        return open_hub_repository(spec.name, pinned or spec.revision)
    except ObjectNotFound as error:
        if pinned is not None:
            raise SourceError(
                f"{spec.text}: the commit this ingest began with, {pinned}, is gone from the Hub ({error}): "
                "ingest the newest into a new folder"
            ) from error
        raise SourceError(f"{spec.text}: {error}: check the spelling of its name and revision") from error
    except StorageError as error:
        raise SourceError(f"{spec.text}: {error}") from error


def _named(storage: ReadableStorage, pattern: str) -> list[str]:
    """Files by a path, by a pattern whose ** crosses folders and whose * does not, or by a folder; of a folder those
    that can be read, as of a local one."""
    wanted = pattern.rstrip("/").split("/")
    every = [info.key for info in storage.list()]
    if pattern in every:
        return [pattern]
    if found := [key for key in every if matches(key.split("/"), wanted)]:
        return found
    below = [key for key in every if key.split("/")[: len(wanted)] == wanted]
    return [key for key in below if can_read(key) and not is_hidden(key)]

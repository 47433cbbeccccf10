"""Files of buckets (``s3://``, ``gs://``, ``az://``) and web servers (``https://``) as sources, pinned to versions.

    s3://bucket/raw/a.jsonl.gz     one file
    s3://bucket/raw                everything readable below it, sorted; hidden files and block stores are left out
    s3://bucket/raw/**/*.parquet   what matches: ** crosses folders, * does not
    https://server/a.parquet       one file: a web server lists no folders

An object's version is its ETag, which is part of the data set's identity. Every range is asked for in that version: a
file that is written while it is read is an error, never a mix of two. The readers are those of local files, over
ranges.
"""

from __future__ import annotations

import glob
import logging
from collections import Counter
from dataclasses import replace
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError, ObjectNotFound, SourceError, StorageError
from penstock.sources.archives import is_hidden
from penstock.sources.files import FileSource
from penstock.sources.formats import ReadOptions, can_read
from penstock.sources.patterns import matches
from penstock.sources.saved import saved_dataset_files
from penstock.storage import ObjectInfo, ObjectStorage
from penstock.storage.address import StoreAddress, parse_address
from penstock.storage.pinned import PinnedStorage

_log = logging.getLogger(__name__)
_STORE_SIGNS = ("block_manifest.json", ".ingest/header.json")


def open_remote(text: str, *, exclude: str | None, options: ReadOptions | None) -> FileSource:
    """Open what a URL names. Asks for what is there, and its versions; reads nothing yet.

    Args:
        text: See the module.
        exclude: A URL never to read below: where the output goes.
        options: How files are read.
    """
    try:
        address = parse_address(text)
    except ConfigError as error:
        told = ": of patterns * ** and [ ] can be used in a URL" if "?" in text and "*" in text else ""
        raise SourceError(f"{error}{told}") from None
    try:
        if address.scheme == "http":
            return _web_file(text, address, options)
        if glob.has_magic(address.prefix):
            return _matching(text, address, exclude, options)
        return _file(text, address, options) or _folder(text, address, exclude, options)
    except StorageError as error:
        told = str(error)
        raise SourceError(told if told.startswith(text) else f"{text}: {told}") from error


def _web_file(text: str, address: StoreAddress, options: ReadOptions | None) -> FileSource:
    folder, _, name = address.bucket.rpartition("/")
    key = unquote(name)
    if not urlsplit(address.bucket).path.strip("/"):
        raise SourceError(f"{text} names no file: expected https://server/folder/file.jsonl; a web server lists none")
    storage = PinnedStorage(ObjectStorage(replace(address, bucket=folder)))
    source = FileSource(spec=text, name=_stem(key), storage=storage, keys=[key], options=options)
    try:
        storage.head(key)
    except ObjectNotFound:
        raise SourceError(f"{text}: the server has no such file") from None
    return source


def _file(text: str, address: StoreAddress, options: ReadOptions | None) -> FileSource | None:
    """The one object of that name; None where there is none."""
    if not address.prefix or text.endswith("/"):
        return None
    folder, _, key = address.prefix.rpartition("/")
    storage = PinnedStorage(ObjectStorage(replace(address, prefix=folder)))
    if not storage.exists(key):
        return None
    return FileSource(spec=text, name=_stem(key), storage=storage, keys=[key], options=options)


def _folder(text: str, address: StoreAddress, exclude: str | None, options: ReadOptions | None) -> FileSource:
    objects = ObjectStorage(address)
    found = list(objects.list())
    if not found:
        raise SourceError(f"{text}: there is no such object, and nothing below it: check its name")
    storage = PinnedStorage(objects, found)
    saved = saved_dataset_files(storage)
    if saved is not None:
        return FileSource(spec=text, name=_stem(_last(address)), storage=storage, keys=saved, options=options)
    keys = _allowed(text, objects.url, [info.key for info in found if not is_hidden(info.key)], exclude)
    stores = _block_stores(text, found)
    keys = [key for key in keys if not any(key.startswith(store) for store in stores)]
    unread = Counter(PurePosixPath(key).suffix or "no suffix" for key in keys if not can_read(key))
    if unread:
        listed = ", ".join(f"{count} x {suffix}" for suffix, count in sorted(unread.items()))
        _log.warning("%s: left out %s: no reader for these", text, listed)
    keys = [key for key in keys if can_read(key)]
    return FileSource(spec=text, name=_stem(_last(address)), storage=storage, keys=keys, options=options)


def _matching(text: str, address: StoreAddress, exclude: str | None, options: ReadOptions | None) -> FileSource:
    parts = address.prefix.split("/")
    fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    root = replace(address, prefix="/".join(parts[:fixed]))
    objects = ObjectStorage(root)
    found = list(objects.list())
    wanted = parts[fixed:]
    named = "/".join(wanted)
    every = [info.key for info in found]
    keys = (
        [named] if named in every else [key for key in every if matches(key.split("/"), wanted) and not is_hidden(key)]
    )
    keys = _allowed(text, objects.url, keys, exclude)
    if not keys:
        raise SourceError(f"{text}: the pattern matches no object")
    storage = PinnedStorage(objects, found)
    return FileSource(spec=text, name=_stem(_last(root)), storage=storage, keys=keys, options=options)


def _allowed(text: str, root: str, keys: list[str], exclude: str | None) -> list[str]:
    """Without what lies where the output goes."""
    if exclude is None:
        return keys
    barred = exclude.rstrip("/") + "/"
    if f"{root}/".startswith(barred):
        raise SourceError(f"{text} lies inside {exclude}, where the output goes: choose another place for the output")
    return [key for key in keys if not f"{root}/{key}".startswith(barred)]


def _block_stores(text: str, found: list[ObjectInfo]) -> list[str]:
    """Prefixes that are block stores, and no files to read."""
    stores = set()
    for info in found:
        for sign in _STORE_SIGNS:
            if info.key == sign:
                raise SourceError(
                    f"{text} is a block store already: use it as it is, or name {text}/blocks to cut it anew"
                )
            if info.key.endswith(f"/{sign}"):
                stores.add(info.key.removesuffix(sign))
    for store in sorted(stores):
        _log.warning("%s/%s: left out: it is a block store; name it as a data set of its own", text, store.rstrip("/"))
    return sorted(stores)


def _last(address: StoreAddress) -> str:
    return address.prefix.rpartition("/")[2] or address.bucket


def _stem(name: str) -> str:
    return name.split(".", maxsplit=1)[0] or name or "dataset"

"""From what the user wrote to a source."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.errors import SourceError
from penstock.sources.base import Source
from penstock.sources.files import FileSource
from penstock.sources.formats import ReadOptions, can_read
from penstock.sources.hub_spec import SCHEME
from penstock.sources.saved import saved_dataset_files
from penstock.storage import LocalStorage

_log = logging.getLogger(__name__)
_REMOTE = ("s3", "s3a", "gs", "az", "azure", "http", "https")
_EXPECTED = "a file, a folder, a glob, hf://name[:config[:split]], s3://bucket/prefix or https://server/file"


def open_source(
    spec: str | os.PathLike[str],
    *,
    exclude: Path | str | None = None,
    options: ReadOptions | None = None,
    pinned: str | None = None,
    want_text: bool = False,
) -> Source:
    """Open a file, a folder (recursively, sorted, without hidden and linked folders), a glob, ``hf://...``, or what a
    bucket (``s3://``, ``gs://``, ``az://``) or a web server (``https://``) holds.

    Args:
        spec: What the user wrote.
        exclude: A folder or a URL never to read from: where the output goes. A single file is what it is, wherever it
            lies.
        options: How files are read.
        pinned: `Source.pinned` of an earlier opening, to get that very version again.
        want_text: Refuse what is known to hold no text.
    """
    text = os.fspath(spec)
    if not text:
        raise SourceError(f"the source is empty: expected {_EXPECTED}")
    if text.startswith(SCHEME):
        from penstock.sources.hub import open_hub

        return open_hub(text, options=options, pinned=pinned, want_text=want_text)
    scheme, is_url, _ = text.partition("://")
    if is_url and scheme in _REMOTE:
        from penstock.sources.remote import open_remote

        return open_remote(text, exclude=exclude if isinstance(exclude, str) else None, options=options)
    if is_url and scheme != "file":
        raise SourceError(f"{scheme}:// is no source: expected {_EXPECTED}")
    folder = exclude if isinstance(exclude, Path) else None
    path = Path(text.removeprefix("file://"))
    if text.startswith("~/"):
        path = path.expanduser()
    if path.is_file():
        storage = LocalStorage(path.parent)
        return FileSource(spec=text, name=_stem(path), storage=storage, keys=[path.name], options=options)
    if path.is_dir():
        saved = saved_dataset_files(LocalStorage(path))
        if saved is not None:
            storage = LocalStorage(path)
            return FileSource(spec=text, name=_stem(path.resolve()), storage=storage, keys=saved, options=options)
        return _from_folder(text, path, _files_below(path), folder, options, only_known=True)
    if glob.has_magic(text):
        root = Path(*_fixed_parts(path))
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - absolute patterns
        if "**" in path.parts:
            found = _each_once(found)
        if any(file.is_file() for file in found):
            return _from_folder(text, root, found, folder, options, only_known=False)
        raise SourceError(f"{text}: the pattern matches no file")
    if path.exists():
        raise SourceError(f"{text}: not a regular file: save what it gives to a file first")
    raise SourceError(f"{text}: no such file or folder")


def _each_once(found: list[Path]) -> list[Path]:
    """Without files met again through a linked folder: ** follows links, in circles too."""
    first: dict[str, Path] = {}
    for path in sorted(found, key=lambda path: (len(path.parts), path)):
        first.setdefault(os.path.realpath(path), path)
    return sorted(first.values())


def _files_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:  # a folder that cannot be listed is never taken for an empty one
        raise SourceError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    for inner, folders, names in os.walk(folder, onerror=refuse):
        is_store = "block_manifest.json" in names or ".ingest" in folders
        folders[:] = [name for name in folders if not name.startswith(".")]
        if is_store and Path(inner) == folder:
            raise SourceError(
                f"{folder} is a block store already: use it as it is, or name {folder}/blocks to cut it anew"
            )
        if is_store:
            _log.warning("%s: left out: it is a block store; name it as a data set of its own", inner)
            folders.clear()
            continue
        for linked in (path for path in (Path(inner, name) for name in folders) if path.is_symlink()):
            _log.warning("%s: left out: a linked folder is not followed; name it as a source of its own", linked)
        for name in names:
            yield Path(inner, name)


def _from_folder(
    spec: str,
    root: Path,
    found: Iterable[Path],
    exclude: Path | None,
    options: ReadOptions | None,
    *,
    only_known: bool,
) -> FileSource:
    barred = exclude.resolve() if exclude else None
    if barred and root.resolve().is_relative_to(barred):
        raise SourceError(f"{spec} lies inside {exclude}, where the output goes: choose another folder for the output")
    keys = set()  # a pattern with several ** matches a file several times
    unread: Counter[str] = Counter()
    for path in found:
        is_readable = path.is_file() or (path.is_symlink() and not path.exists())  # a broken link is told, not left out
        if not is_readable or (barred and Path(os.path.realpath(path)).is_relative_to(barred)):
            continue
        inside = path.relative_to(root)
        if any(part.startswith(".") for part in inside.parts):
            continue
        if only_known and not can_read(path.name):
            unread[path.suffix or "no suffix"] += 1
            continue
        keys.add(inside.as_posix())
    if unread:
        listed = ", ".join(f"{count} x {suffix}" for suffix, count in sorted(unread.items()))
        _log.warning("%s: left out %s: no reader for these", spec, listed)
    storage = LocalStorage(root)
    return FileSource(spec=spec, name=_stem(root.resolve()), storage=storage, keys=sorted(keys), options=options)


def _fixed_parts(pattern: Path) -> list[str]:
    parts = []
    for part in pattern.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts or ["."]


def _stem(path: Path) -> str:
    return path.name.split(".")[0] or path.name or "dataset"

"""From what the user wrote to a source."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from pathlib import Path

from penstock.errors import SourceError
from penstock.sources.base import Source
from penstock.sources.files import READERS, FileSource
from penstock.storage import LocalStorage

_log = logging.getLogger(__name__)


def open_source(spec: str | os.PathLike[str], *, exclude: Path | None = None) -> Source:
    """Open a file, a folder (recursively, sorted) or a glob; `exclude` is a folder never to read from."""
    text = os.fspath(spec)
    if "://" in text:
        raise SourceError(f"{text}: sources by URL are not supported: expected a file, a folder or a glob")
    path = Path(text).expanduser()
    if path.is_file():
        return FileSource(spec=text, name=_stem(path), storage=LocalStorage(path.parent), keys=[path.name])
    if path.is_dir():
        return _from_folder(text, path, sorted(path.rglob("*")), exclude, only_known=True)
    if glob.has_magic(text):
        root = Path(*_fixed_parts(path))
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - absolute patterns
        if any(file.is_file() for file in found):
            return _from_folder(text, root, found, exclude, only_known=False)
        raise SourceError(f"{text}: the pattern matches no file")
    raise SourceError(f"{text}: no such file or folder")


def _from_folder(spec: str, root: Path, found: list[Path], exclude: Path | None, *, only_known: bool) -> FileSource:
    barred = exclude.resolve() if exclude else None
    keys = []
    unread: Counter[str] = Counter()
    for path in found:
        if not path.is_file() or (barred and path.resolve().is_relative_to(barred)):
            continue
        inside = path.relative_to(root)
        if any(part.startswith(".") for part in inside.parts):
            continue
        if only_known and path.suffix.lower() not in READERS:
            unread[path.suffix or "no suffix"] += 1
            continue
        keys.append(inside.as_posix())
    if unread:
        listed = ", ".join(f"{count} x {suffix}" for suffix, count in sorted(unread.items()))
        _log.warning("%s: left out %s: no reader for these", spec, listed)
    return FileSource(spec=spec, name=_stem(root.resolve()), storage=LocalStorage(root), keys=sorted(keys))


def _fixed_parts(pattern: Path) -> list[str]:
    parts = []
    for part in pattern.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts or ["."]


def _stem(path: Path) -> str:
    return path.name.split(".")[0] or path.name or "dataset"

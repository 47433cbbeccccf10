"""Zip and tar archives: every member a file of its own, read in place."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from penstock.sources.base import Cursor, RowBatch
from penstock.sources.streams import unseekable

ReadMember = Callable[[BinaryIO, str, Cursor], Iterator[RowBatch]]
"""Reads one member, given its bytes, its name and where to start in it."""


def read_zip(
    file: BinaryIO, name: str, start: Cursor, accepts: Callable[[str], bool], read: ReadMember
) -> Iterator[RowBatch]:
    """Members by name; each is found through the archive's directory."""
    with zipfile.ZipFile(file) as archive:
        infos = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda info: info.filename)
        for number, info in enumerate(infos):
            if number >= start.member and accepts(info.filename):
                with archive.open(info) as member:
                    yield from read(cast(BinaryIO, member), f"{name}/{info.filename}", _begin(start, number))


def read_tar(
    file: BinaryIO, name: str, start: Cursor, accepts: Callable[[str], bool], read: ReadMember
) -> Iterator[RowBatch]:
    """Members in the archive's order, in one pass; going on in the middle passes over what comes before."""
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for number, info in enumerate(archive):
            if number >= start.member and info.isfile() and accepts(info.name):
                member = archive.extractfile(info)
                assert member is not None
                yield from read(unseekable(member), f"{name}/{info.name}", _begin(start, number))


def _begin(start: Cursor, member: int) -> Cursor:
    return start if member == start.member else Cursor(file=start.file, member=member)


def is_hidden(name: str) -> bool:
    """Members that archivers add for themselves, and hidden ones."""
    parts = name.split("/")
    return "__MACOSX" in parts or any(part.startswith(".") and part not in (".", "..") for part in parts)

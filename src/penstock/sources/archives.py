"""Zip and tar archives: every member a file of its own, read in place."""

from __future__ import annotations

import logging
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, Self, cast

from penstock.errors import SourceError
from penstock.sources.base import Cursor, RowBatch, refuse_unless_utf8
from penstock.sources.streams import BUFFER_BYTES, read_some, unseekable

ReadMember = Callable[[BinaryIO, str, Cursor], Iterator[RowBatch]]
"""Reads one member, given its bytes, its name and where to start in it."""

_log = logging.getLogger(__name__)


class Members:
    """Which members are read, and what was left out."""

    def __init__(self, archive: str, can_read: Callable[[str], bool]) -> None:
        self._archive = archive
        self._can_read = can_read
        self._left_out: Counter[str] = Counter()
        self._tokens: set[str] = set()
        self._indexes: set[str] = set()
        self._found = False

    def accepts(self, name: str) -> bool:
        if is_hidden(name):
            return False
        stem, _, suffix = name.rpartition(".")
        if suffix in ("bin", "idx"):
            (self._tokens if suffix == "bin" else self._indexes).add(stem)
        if not self._can_read(name):
            self._left_out[PurePosixPath(name).suffix or "no suffix"] += 1
            return False
        refuse_unless_utf8(f"{self._archive}/{name}")
        self._found = True
        return True

    def tell_left_out(self) -> None:
        """Say which members nobody can read; where those are all, that is an error."""
        for stem in sorted(self._tokens & self._indexes):
            raise SourceError(
                f"{self._archive}/{stem}.bin has an index beside it, which cannot be used inside an archive: unpack it"
            )
        listed = ", ".join(f"{count} x {suffix}" for suffix, count in sorted(self._left_out.items()))
        if not self._found:
            raise SourceError(f"{self._archive} holds no file that can be read: got {listed or 'no files'}")
        if listed:
            _log.warning("%s: left out %s: no reader for these", self._archive, listed)


def read_zip(file: BinaryIO, name: str, start: Cursor, members: Members, read: ReadMember) -> Iterator[RowBatch]:
    """Members by name; each is found through the archive's directory."""
    with zipfile.ZipFile(file) as archive:
        infos = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda info: info.filename)
        for number, info in enumerate(infos):
            if members.accepts(info.filename) and number >= start.member:
                inner = f"{name}/{info.filename}"
                with _open_zipped(archive, info, inner) as member:
                    yield from read(unseekable(member), inner, _begin(start, number))
    members.tell_left_out()


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> zipfile.ZipExtFile:
    try:
        return archive.open(info)  # pyright: ignore[reportReturnType] - opened for reading
    except RuntimeError as error:  # encrypted, or packed by a method Python does not have
        raise SourceError(f"{name}: cannot be unpacked: {error}: unpack the archive and name its folder") from error


class _Member(tarfile.TarInfo):
    """A tar header. Python takes a missing or damaged one for the end of the archive; only a blank one is."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise
            raise EOFError(f"the archive ends without its end mark: {error}") from error


def read_tar(file: BinaryIO, name: str, start: Cursor, members: Members, read: ReadMember) -> Iterator[RowBatch]:
    """Members in the archive's order, in one pass; going on in the middle passes over what comes before."""
    packed = cast(BinaryIO, SimpleNamespace(read=read_some(file)))
    with tarfile.open(fileobj=packed, mode="r|", bufsize=BUFFER_BYTES, tarinfo=_Member) as archive:
        number = 0
        while (info := archive.next()) is not None:
            if info.isfile() and members.accepts(info.name) and number >= start.member:
                member = archive.extractfile(info)
                assert member is not None
                yield from read(unseekable(member), f"{name}/{info.name}", _begin(start, number))
            number += 1
            cast(Any, archive).members.clear()  # it would remember them all
    while file.read(BUFFER_BYTES):  # what packs the archive has a checksum at its end
        pass
    members.tell_left_out()


def _begin(start: Cursor, member: int) -> Cursor:
    return start if member == start.member else Cursor(file=start.file, member=member)


def is_hidden(name: str) -> bool:
    """Members that archivers add for themselves, and hidden ones."""
    parts = name.split("/")
    return "__MACOSX" in parts or any(part.startswith(".") and part not in (".", "..") for part in parts)

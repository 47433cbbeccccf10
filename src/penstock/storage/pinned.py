"""Objects of a bucket or a web server as they were when first looked at: what changes later is an error, not a mix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import BinaryIO

from penstock.errors import ObjectNotFound
from penstock.storage.base import ObjectInfo
from penstock.storage.objects import ObjectStorage


class PinnedStorage:
    """The reading half of an object store, each object pinned to the version it had when it was first looked at.

    Reading one that was written since is `PreconditionFailed`, at whatever byte it is noticed: a server is asked for
    that version, and its answer compared. What a list told needs no request of its own. Safe for threads.
    """

    def __init__(self, storage: ObjectStorage, listed: Iterable[ObjectInfo] | None = None) -> None:
        """Remember the store; `listed` is all that it holds, where that was asked for already."""
        self._storage = storage
        self._listed = {info.key: info for info in listed} if listed is not None else None
        # S3 lists the versions that it answers with. Others may spell them differently, so there they are asked for.
        self._known = dict(self._listed or {}) if storage.address.scheme == "s3" else {}
        self._absent: set[str] = set()

    @property
    def url(self) -> str:
        return self._storage.url

    def __repr__(self) -> str:
        return f"PinnedStorage({self._storage!r})"

    def get(self, key: str) -> bytes:
        return self.get_with_info(key)[0]

    def get_with_info(self, key: str) -> tuple[bytes, ObjectInfo]:
        info = self._pinned(key)
        return self._storage.get_range_of(info, 0, info.size_bytes), self.head(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._storage.get_range_of(self._pinned(key), start, stop)

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        return self._storage.reader_of(self._pinned(key), start)

    def head(self, key: str) -> ObjectInfo:
        info = self._pinned(key)
        # What has a version cannot change here, so when it was written says nothing more.
        return replace(info, modified=None) if info.version is not None else info

    def exists(self, key: str) -> bool:
        try:
            self._pinned(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._storage.list(prefix) if self._listed is None else self._listed.values()
        for info in found:
            if info.key.startswith(prefix):
                yield self.head(info.key)

    def _pinned(self, key: str) -> ObjectInfo:
        found = self._known.get(key)
        if found is None:
            if (self._listed is not None and key not in self._listed) or key in self._absent:
                raise ObjectNotFound(f"{self.url}/{key} was not there when it was first looked for")
            try:
                found = self._known.setdefault(key, self._storage.head(key))
            except ObjectNotFound:
                self._absent.add(key)
                raise
        return found

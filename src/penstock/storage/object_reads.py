"""What reading a whole object or a part of it is, whichever way the bytes come."""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.errors import ObjectNotFound
from penstock.storage.base import ObjectInfo
from penstock.storage.keys import check_key, check_range
from penstock.storage.partial import PartialRead

_FURTHEST = 1 << 62
"""Behind the end of any object: a range from there on is not asked for, since servers take it for a negative one."""


class ReadsObjects(ABC):
    """`get`, `get_with_info`, `get_range` and `exists` for whoever can look at an object and read on."""

    def get(self, key: str) -> bytes:
        return self.get_with_info(key)[0]

    def get_with_info(self, key: str) -> tuple[bytes, ObjectInfo]:
        check_key(key)
        partial = PartialRead()
        self._read(key, partial)
        assert partial.info is not None
        return partial.joined(), partial.info

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._range(key, start, stop).joined()

    def view(self, key: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Bytes ``[start, stop)`` where they have arrived, while `get` and `get_range` copy them once more: for much
        data that is only looked at."""
        return self._range(key, start, stop).view()

    def _range(self, key: str, start: int, stop: int | None) -> PartialRead:
        check_key(key)
        check_range(self._what(key), start, _FURTHEST if stop is None else stop)
        partial = PartialRead(start, stop)
        if start == stop or start >= _FURTHEST:
            self.head(key)
        else:
            self._read(key, partial)
        return partial

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True

    @abstractmethod
    def head(self, key: str) -> ObjectInfo: ...

    @abstractmethod
    def _read(self, key: str, partial: PartialRead) -> None:
        """Read on until all is there; tries again what failed for a passing reason."""

    @abstractmethod
    def _what(self, key: str) -> str:
        """An object's name, for people to read."""

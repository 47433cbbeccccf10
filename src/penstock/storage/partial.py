"""What of an object has arrived so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import StorageError, TransientStoreError
from penstock.storage.base import ObjectInfo

if TYPE_CHECKING:
    from obstore import Bytes

    Piece = Bytes | bytes | memoryview


class ChangedWhileRead(TransientStoreError):
    """What was read so far is of another object than what is there: reading begins again."""


class PartialRead:
    """Bytes ``[start, stop)`` of one object, as far as they have arrived; `stop` None is the end.

    Goes on at the byte where an answer broke off, as long as the object is the same; begins again where it is not.
    """

    def __init__(self, start: int = 0, stop: int | None = None, *, version: str | None = None) -> None:
        self.start = start
        self.stop = stop
        self.pinned = version
        """The only version that will do."""
        self.info: ObjectInfo | None = None
        self.pieces: list[Piece] = []
        """As they came: nothing is copied before all is there."""
        self.arrived = 0
        self.was_begun = False
        """Whether a body has begun to arrive: who asks again after that has one that broke off."""
        self.restarts = 0
        self.answered_at: float | None = None
        """When an answer began."""
        self.awaited_bytes = 0
        """How many bytes it is to bring."""
        self.is_abandoned = False
        """Whether nobody wants it any more: what is still to come is not read."""

    @property
    def version(self) -> str | None:
        return self.info.version if self.info is not None else self.pinned

    def begin(self, info: ObjectInfo) -> None:
        """An answer tells what the object is; its body is not taken yet, and never where this raises."""
        self.info = info

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.arrived += len(piece)

    def begin_again(self) -> None:
        self.info, self.pieces, self.arrived = None, [], 0
        self.restarts += 1

    def branch(self, version: str | None) -> PartialRead:
        """Another that goes on from here, for one who may be given up or overtaken; with what has arrived, unless that
        is of another `version` than the only one that will do there."""
        other = PartialRead(self.start, self.stop, version=version)
        other.was_begun, other.restarts = self.was_begun, self.restarts
        if self.arrived and version in (None, self.version):
            other.info, other.pieces, other.arrived = self.info, list(self.pieces), self.arrived
        return other

    def join(self, other: PartialRead) -> int:
        """Take over what a branch has, where that is more or begins again; tells how many bytes more."""
        more = max(0, other.arrived - self.arrived)
        self.was_begun = self.was_begun or other.was_begun
        if more or other.restarts > self.restarts:
            self.take_over(other)
        return more

    def take_over(self, other: PartialRead) -> None:
        """Have what a branch has."""
        self.info, self.pieces, self.arrived = other.info, other.pieces, other.arrived
        self.restarts = other.restarts

    def view(self) -> memoryview:
        """The bytes where they arrived, if they arrived as a whole."""
        return memoryview(self.pieces[0] if len(self.pieces) == 1 else self.joined())

    def joined(self) -> bytes:
        return b"".join(self.pieces)


class AllowedRead(PartialRead):
    """A whole object, if what it is will do; pieces go where they belong as they come, so that it is held once."""

    def __init__(self, allow: Callable[[ObjectInfo], None]) -> None:
        super().__init__()
        self._allow = allow
        self._place: memoryview | None = None

    def begin(self, info: ObjectInfo) -> None:
        if self.info is None:
            self._allow(info)
        super().begin(info)

    def add(self, piece: Piece) -> None:
        assert self.info is not None
        stop = self.arrived + len(piece)
        if stop > self.info.size_bytes:
            raise StorageError(f"{self.info.key}: more came than the {self.info.size_bytes} bytes it was said to have")
        if self._place is None and len(piece) < self.info.size_bytes:
            self._place = memoryview(bytearray(self.info.size_bytes))
        if self._place is None:
            self.pieces.append(piece)
        else:
            self._place[self.arrived : stop] = piece
        self.arrived = stop

    def begin_again(self) -> None:
        super().begin_again()
        self._place = None

    def view(self) -> memoryview:
        return super().view() if self._place is None else self._place.toreadonly()

"""The storage contract: what every backend promises, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What can be known of an object without reading it."""

    key: str
    size_bytes: int
    version: str | None = None
    """What the store calls this very content (a blob's hash, an ETag); None where it has no name for it, and where
    looking alone does not tell: a local folder names it only to `get_with_info` and conditional puts."""
    modified: str | None = field(default=None, compare=False)
    """Another one whenever the object was written again; says nothing across machines. None where it cannot change."""


StillHeld = Callable[[], None]
"""Raises `StorageBusy` once a lock is another's, or may be."""


class ObjectWriter(Protocol):
    """Writes one object piece by piece. Leaving the `with` block makes it visible; an exception leaves nothing."""

    def write(self, data: bytes) -> None: ...

    def __enter__(self) -> ObjectWriter: ...

    def __exit__(self, *exc_info: object) -> None: ...


class ReadableStorage(Protocol):
    """Objects by key, to read: all that a source needs. Failures and safety as for `Storage`."""

    @property
    def url(self) -> str:
        """Where this store is, as a user would write it; without secrets."""
        ...

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        ...

    def get_with_info(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read a whole object together with what it is; the info names the `version` of these very bytes."""
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Read bytes ``[start, stop)``; shorter only where the object ends. One seek and one read."""
        ...

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        """Open an object for reading from a byte offset; the caller closes it. Made for reading on; it can seek."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size of an object; `ObjectNotFound` where there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Whether `head` would find an object."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, sorted by key; unfinished writes are not among them."""
        ...


@runtime_checkable
class Storage(ReadableStorage, Protocol):
    """Objects by key: relative paths with forward slashes, such as ``blocks/block_00000.jsonl``.

    Atomicity: a reader sees an object whole, or its predecessor, or none; never a part, not even after power loss.
    Durability: when `put` returns or a writer's ``with`` block ends, the object survives power loss (one fsync of the
    object and one of its folder; on an object store, one request, or one a part of a large object).
    Safety: an instance may be shared by threads and pickled to spawned processes. It connects when first used; object
    stores are refused in a process that was forked after that.
    Failures: `ObjectNotFound`, `AccessDenied`, `PreconditionFailed`, `StorageBusy`, `StorageFull`, otherwise
    `StorageError`; each names the object. A key or a range that cannot be one is a `ConfigError`.
    """

    def get_if(self, key: str, allow: Callable[[ObjectInfo], None]) -> tuple[memoryview, ObjectInfo]:
        """Read a whole object if what it is will do: `allow` sees it before a byte is taken into memory, and what it
        raises is raised. Size and time are those of these very bytes. One request, or one open; held once.

        Where a connection broke off and the object was written again meanwhile, `allow` is asked again."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write a whole object, replacing any other under this key. Idempotent."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> ObjectInfo:
        """Write a whole object unless the key is taken: then `PreconditionFailed`, and nothing changes.

        Of many that try, one wins, and it knows: a try whose answer was lost is recognised as one's own."""
        ...

    def put_if_match(self, key: str, data: bytes, version: str) -> ObjectInfo:
        """Replace an object that is still the `version` seen before, else `PreconditionFailed`, and nothing changes.

        The version is that of `get_with_info` or of an earlier conditional put. Keys written so are written only so:
        a local folder holds conditional puts against each other, not against `put` and `delete`."""
        ...

    def writer(self, key: str) -> ObjectWriter:
        """Write an object piece by piece in memory bounded by the pieces."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""
        ...

    def discard_unfinished(self, prefix: str = "") -> int:
        """Remove what killed writers left under `prefix`; only for the holder of `exclusive`. Returns how many.

        An object store keeps the parts of a killed upload out of sight and of reach: a lifecycle rule removes them."""
        ...

    def exclusive(self, name: str, *, purpose: str) -> AbstractContextManager[StillHeld]:
        """Hold the lock `name` of this store, or raise `StorageBusy`; it ends with the process, even a killed one.

        On an object store that takes up to half a minute where the killed one was on another machine, and a holder
        that was cut off for so long loses the lock: leaving the block then raises `StorageBusy`, and so does what the
        block is given, which costs nothing to call: ask it before whatever another holder must not see written."""
        ...

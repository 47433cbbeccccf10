"""One request at a time to an object store, each tried once: whoever calls decides what follows a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import PreconditionFailed, StorageError, TransientStoreError
from penstock.storage.address import StoreAddress
from penstock.storage.answers import RangeNotThere
from penstock.storage.base import ObjectInfo
from penstock.storage.connection import READING, WRITING, Timeouts, call, connect, refuse_after_fork
from penstock.storage.keys import check_prefix
from penstock.storage.retry import RetryBudget

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

_PAGE = 1000
_WHOLE_BYTES = 16 << 20
"""Up to this a body is taken as a whole, which is quickest. Larger ones, and those that broke off once, are taken in
pieces, so that what has arrived is kept."""
_PIECE_BYTES = 128 << 10
"""At least so much a piece; a quick connection hands out larger ones, which are taken as they are."""
_LAST_BYTE = (1 << 63) - 1
_WEAK = "W/"
"""How an ETag begins that tells content, not bytes: no condition may be put on it, so it is compared."""
PUT_MARK = "penstockput"
"""The attribute by which a conditional put whose answer was lost recognises itself."""


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
        self.pieces: list[Bytes] = []
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

    def add(self, piece: Bytes) -> None:
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

    def add(self, piece: Bytes) -> None:
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


class ObjectClient:
    """The requests. Shared by threads; pickles without its connection."""

    def __init__(self, address: StoreAddress, timeouts: Timeouts) -> None:
        self.address = address
        self.timeouts = timeouts
        self._lock = threading.Lock()
        self._stores: dict[RetryBudget | str, ObjectStore] = {}

    def __getstate__(self) -> tuple[StoreAddress, Timeouts]:
        return self.address, self.timeouts

    def __setstate__(self, state: tuple[StoreAddress, Timeouts]) -> None:
        self.__init__(*state)

    def what(self, key: str) -> str:
        """An object's name for messages."""
        return f"{self.address.url}/{key}" if key else self.address.url

    def read_on(self, key: str, partial: PartialRead) -> None:
        """Read what is missing, in one request. What arrives before a failure stays in `partial`."""
        try:
            self._read_on(key, partial)
        except RangeNotThere:
            if partial.start == partial.arrived == 0 and partial.stop is None:
                raise
            # behind the end there is nothing; the object itself is there

    def _read_on(self, key: str, partial: PartialRead) -> None:
        what = self.what(key)
        first = partial.start + partial.arrived
        options: dict[str, Any] = {}
        if partial.stop is not None:
            options["range"] = (first, min(partial.stop, _LAST_BYTE))
        elif first:
            options["range"] = {"offset": first}
        if partial.version is not None and not partial.version.startswith(_WEAK):
            options["if_match"] = self._split(partial.version)[0]
        path = self.address.path(key)
        store = self._store()
        try:
            result = call(lambda: store.get(path, options=options or None), what)
        except PreconditionFailed:
            if partial.pinned is not None:
                raise
            partial.begin_again()
            raise ChangedWhileRead(f"{what} changed while it was read") from None
        partial.answered_at = time.monotonic()
        if partial.is_abandoned:
            return  # the connection is closed with what it would bring
        meta, (begins, ends) = result.meta, result.range
        if begins != first:
            raise StorageError(
                f"{what}: asked for bytes from {first}, got them from {begins}: ranges are not kept here"
            )
        info = self._info(key, meta)
        if partial.pinned is not None and info.version != partial.pinned:  # a server that knows no conditions
            raise PreconditionFailed(f"{what}: asked for version {partial.pinned}, got {info.version}")
        if partial.info is not None and (partial.info.size_bytes, partial.version) != (info.size_bytes, info.version):
            partial.begin_again()
            raise ChangedWhileRead(f"{what} changed while it was read")
        partial.begin(info)
        partial.awaited_bytes = ends - begins
        self._take(result, partial, what)

    def _take(self, result: Any, partial: PartialRead, what: str) -> None:
        """Take the body of an answer."""
        begins, ends = result.range
        before = partial.arrived
        as_a_whole = ends - begins <= _WHOLE_BYTES and not partial.was_begun
        partial.was_begun = True
        if as_a_whole:
            partial.add(call(result.bytes, what))
        else:
            pieces = iter(result.stream(min_chunk_size=_PIECE_BYTES))
            while (piece := call(lambda: next(pieces, None), what)) is not None:
                partial.add(piece)
                if partial.is_abandoned:
                    return
        if partial.arrived - before != ends - begins:
            raise TransientStoreError(f"{what}: the answer broke off at byte {partial.start + partial.arrived}")

    def head(self, key: str) -> ObjectInfo:
        store, path = self._store(), self.address.path(key)
        return self._info(key, call(lambda: store.head(path), self.what(key)))

    def list_on(self, prefix: str, found: dict[str, ObjectInfo]) -> None:
        """List what comes behind the last of `found`, adding to it page by page."""
        inside = check_prefix(prefix)
        top = self.address.path(inside).rstrip("/") if inside else self.address.prefix
        after = self.address.path(next(reversed(found))) if found else None
        store, what = self._store(), self.what(prefix)
        pages = iter(call(lambda: store.list(top or None, offset=after, chunk_size=_PAGE), what))
        skip = len(self.address.prefix) + 1 if self.address.prefix else 0
        while (page := call(lambda: next(pages, None), what)) is not None:
            for meta in page:
                key = meta["path"][skip:]
                found[key] = self._info(key, meta)

    def put(
        self, key: str, data: bytes, *, if_absent: bool = False, replacing: str | None = None, mark: str = ""
    ) -> ObjectInfo:
        """Write an object in one request: whatever is there, only where nothing is, or only where a version is."""
        mode: Any = "create" if if_absent else "overwrite"
        if replacing is not None:
            e_tag, generation = self._split(replacing)
            mode = {"e_tag": e_tag} if generation is None else {"e_tag": e_tag, "version": generation}
        store, path = self._store(WRITING), self.address.path(key)
        attributes = {PUT_MARK: mark} if mark else None
        told = call(
            lambda: store.put(path, data, mode=mode, attributes=attributes, use_multipart=False), self.what(key)
        )
        return ObjectInfo(key, len(data), version=self._joined(told))

    def marked(self, key: str) -> tuple[str, ObjectInfo]:
        """The mark of the conditional put that wrote an object, empty where there is none."""
        store, path = self._store(), self.address.path(key)
        result = call(lambda: store.get(path, options={"head": True}), self.what(key))
        attributes: dict[str, Any] = dict(result.attributes)
        return str(attributes.get(PUT_MARK, "")), self._info(key, result.meta)

    def delete(self, key: str) -> None:
        store, path = self._store(), self.address.path(key)
        call(lambda: store.delete(path), self.what(key))

    def upload(self, key: str, budget: RetryBudget, *, part_bytes: int, parallel: int, mark: str) -> Any:
        """Begin a large upload: obstore's writer, which sends a part again by itself, within `budget`."""
        import obstore

        store, path = self._store(budget), self.address.path(key)
        return obstore.open_writer(
            store, path, buffer_size=part_bytes, max_concurrency=parallel, attributes={PUT_MARK: mark}
        )

    def _info(self, key: str, meta: Any) -> ObjectInfo:
        modified = meta["last_modified"]
        return ObjectInfo(
            key, meta["size"], version=self._joined(meta), modified=modified.isoformat() if modified else None
        )

    def _joined(self, told: Any) -> str | None:
        """A version as one text: the ETag; on GCS, which replaces by generation, that behind it."""
        if self.address.scheme == "gs" and told["e_tag"] and told["version"]:
            return f"{told['e_tag']}#{told['version']}"
        return told["e_tag"]

    def _split(self, version: str) -> tuple[str, str | None]:
        if self.address.scheme != "gs":
            return version, None
        e_tag, _, generation = version.rpartition("#")
        return e_tag, generation

    def _store(self, use: RetryBudget | str = READING) -> Any:
        """The connection for a use: reading, writing, or large uploads, whose parts are tried again within a budget."""
        refuse_after_fork()
        with self._lock:
            found = self._stores.get(use)
            if found is None:
                found = self._stores[use] = connect(self.address, self.timeouts, use)
            return found

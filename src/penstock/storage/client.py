"""One request at a time to an object store, each tried once: whoever calls decides what follows a failure."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.errors import PreconditionFailed, StorageError, TransientStoreError
from penstock.storage.address import StoreAddress
from penstock.storage.answers import RangeNotThere
from penstock.storage.base import ObjectInfo
from penstock.storage.connection import READING, WRITING, Timeouts, call, connect, refuse_after_fork
from penstock.storage.keys import check_prefix
from penstock.storage.partial import ChangedWhileRead, PartialRead
from penstock.storage.plain_answer import PlainAnswer
from penstock.storage.plain_http import PlainReads, speaks_plainly
from penstock.storage.retry import RetryBudget

if TYPE_CHECKING:
    from obstore import GetResult
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
_SIGNED_FOR = timedelta(hours=1)
"""A signed address is used at once; clocks that differ are why this is not shorter."""
PUT_MARK = "penstockput"
"""The attribute by which a conditional put whose answer was lost recognises itself."""


class StoreAnswer:
    """An answer that obstore has, up to where its body begins."""

    def __init__(self, result: GetResult, what: str) -> None:
        self._result = result
        self._what = what

    @property
    def meta(self) -> Any:
        return self._result.meta

    @property
    def range(self) -> tuple[int, int]:
        return self._result.range

    def take(self, partial: PartialRead) -> None:
        """Take the body; what arrives before a failure stays."""
        begins, ends = self.range
        before = partial.arrived
        as_a_whole = ends - begins <= _WHOLE_BYTES and not partial.was_begun
        partial.was_begun = True
        if as_a_whole:
            partial.add(call(self._result.bytes, self._what))
        else:
            pieces = iter(self._result.stream(min_chunk_size=_PIECE_BYTES))
            while (piece := call(lambda: next(pieces, None), self._what)) is not None:
                partial.add(piece)
                if partial.is_abandoned:
                    return
        if partial.arrived - before != ends - begins:
            raise TransientStoreError(f"{self._what}: the answer broke off at byte {partial.start + partial.arrived}")

    def close(self) -> None:
        """Nothing here: the connection is closed with what it would bring."""


class ObjectClient:
    """The requests. Shared by threads; pickles without its connection."""

    def __init__(self, address: StoreAddress, timeouts: Timeouts) -> None:
        self.address = address
        self.timeouts = timeouts
        self._lock = threading.Lock()
        self._stores: dict[RetryBudget | str, ObjectStore] = {}
        self._is_plain: bool | None = None
        self._plain: PlainReads | None = None

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
        try:
            answer = self._ask(self.address.path(key), what, options)
        except PreconditionFailed:
            if partial.pinned is not None:
                raise
            partial.begin_again()
            raise ChangedWhileRead(f"{what} changed while it was read") from None
        partial.answered_at = time.monotonic()
        with closing(answer):
            if not partial.is_abandoned:
                self._take(key, answer, partial, first)

    def _ask(self, path: str, what: str, options: dict[str, Any]) -> StoreAnswer | PlainAnswer:
        store = self._store()
        plain = self._plain_reads(store)
        answer = plain.get(path, what, options) if plain is not None else None
        return answer or StoreAnswer(call(lambda: store.get(path, options=options or None), what), what)

    def _take(self, key: str, answer: StoreAnswer | PlainAnswer, partial: PartialRead, first: int) -> None:
        """Take the body of an answer, if it is what was asked for."""
        what = self.what(key)
        begins, ends = answer.range
        if begins != first:
            raise StorageError(
                f"{what}: asked for bytes from {first}, got them from {begins}: ranges are not kept here"
            )
        info = self._info(key, answer.meta)
        if partial.pinned is not None and info.version != partial.pinned:  # a server that knows no conditions
            raise PreconditionFailed(f"{what}: asked for version {partial.pinned}, got {info.version}")
        if partial.info is not None and (partial.info.size_bytes, partial.version) != (info.size_bytes, info.version):
            partial.begin_again()
            raise ChangedWhileRead(f"{what} changed while it was read")
        partial.begin(info)
        partial.awaited_bytes = ends - begins
        answer.take(partial)

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

    def _plain_reads(self, store: Any) -> PlainReads | None:
        """What reads without obstore, which signs for it; None where that cannot be."""
        with self._lock:
            if self._is_plain is None:
                self._is_plain = speaks_plainly(self.address)
                if self._is_plain:
                    from obstore import sign

                    self._plain = PlainReads(
                        lambda path, what: call(lambda: sign(store, "GET", path, _SIGNED_FOR), what), self.timeouts
                    )
            return self._plain

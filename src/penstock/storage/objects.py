"""The storage contract on an object store: S3 and what speaks like it (R2, MinIO), GCS, Azure, plain HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, TypeVar

from penstock.errors import ObjectNotFound, PreconditionFailed, TransientStoreError
from penstock.faults import reach
from penstock.storage.address import Options, StoreAddress, parse_address
from penstock.storage.base import ObjectInfo, StillHeld
from penstock.storage.client import ObjectClient
from penstock.storage.connection import Timeouts
from penstock.storage.keys import RESERVED, check_key, check_offset, check_prefix, check_range
from penstock.storage.lease import leased
from penstock.storage.object_reads import ReadsObjects
from penstock.storage.partial import AllowedRead, PartialRead
from penstock.storage.ranged import open_ranged
from penstock.storage.retry import Budgets, Patience, with_retries
from penstock.storage.upload import PART_BYTES, ObjectWriterInParts, part_bytes

T = TypeVar("T")


class ObjectStorage(ReadsObjects):
    """Objects of a bucket below a prefix. Connects on first use; safe for threads and spawned processes.

    Every request that fails for a passing reason is tried again within `budgets`; reading goes on at the byte where it
    broke off. Of a wrong credential the first answer is the last.
    """

    def __init__(
        self, address: StoreAddress, *, budgets: Budgets | None = None, timeouts: Timeouts | None = None
    ) -> None:
        self.address = address
        self.budgets = budgets or Budgets()
        self.timeouts = timeouts or Timeouts()
        self._client = ObjectClient(address, self.timeouts)

    @classmethod
    def from_url(cls, url: str, options: Options | None = None, **more: Any) -> ObjectStorage:
        """The store behind a URL, see `parse_address`. Does no I/O."""
        return cls(parse_address(url, options), **more)

    @property
    def url(self) -> str:
        return self.address.url

    def __repr__(self) -> str:
        return f"ObjectStorage({self.address.told!r})"

    # Reading

    def get_range_of(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of the very object that `info` tells of; `PreconditionFailed` where it was written
        since. Where the store names no versions, size and time of writing tell."""
        check_range(self._what(info.key), start, stop)
        if start >= min(stop, info.size_bytes):
            return b""
        partial = PartialRead(start, stop, version=info.version)
        self._read(info.key, partial)
        got = partial.info
        if info.version is None and got is not None:
            expected = f"{info.size_bytes} bytes of {info.modified}"
            found = f"{got.size_bytes} bytes of {got.modified}"
            if found != expected:
                raise PreconditionFailed(f"{self._what(info.key)} was written again: expected {expected}, got {found}")
        return partial.joined()

    def get_if(self, key: str, allow: Callable[[ObjectInfo], None]) -> tuple[memoryview, ObjectInfo]:
        check_key(key)
        partial = AllowedRead(allow)
        self._read(key, partial)
        assert partial.info is not None
        return partial.view(), partial.info

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        check_offset(self._what(key), start)
        return self.reader_of(self.head(key), start)

    def reader_of(self, info: ObjectInfo, start: int = 0) -> BinaryIO:
        """`reader` of the very object that `info` tells of; see `get_range_of`."""
        what = self._what(info.key)
        check_offset(what, start)
        return open_ranged(info, what, lambda first, stop: self.get_range_of(info, first, stop), start)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return with_retries(lambda: self._client.head(key), self.budgets.metadata, self._what(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found: dict[str, ObjectInfo] = {}
        patience = Patience(budget=self.budgets.metadata, what=self._what(prefix))
        while True:
            seen = len(found)
            try:
                self._client.list_on(prefix, found)
                break
            except TransientStoreError as error:
                if len(found) > seen:  # a list that grows is no list that fails
                    patience = Patience(budget=self.budgets.metadata, what=patience.what)
                patience.spend(error)
        for key in sorted(found):  # not every store lists in this order
            if key.startswith(prefix) and not key.endswith(RESERVED):
                yield found[key]

    def _what(self, key: str) -> str:
        return self._client.what(key)

    def _read(self, key: str, partial: PartialRead) -> None:
        patience = Patience(budget=self.budgets.data, what=self._what(key))
        while True:
            before = partial.arrived
            try:
                self._client.read_on(key, partial)
                return
            except TransientStoreError as error:
                patience.refresh(max(0, partial.arrived - before))
                patience.spend(error)

    # Writing

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        if len(data) > PART_BYTES:
            with ObjectWriterInParts(
                self._client, key, lambda _: None, self.budgets.writes, part_bytes(len(data))
            ) as writer:
                writer.write(data)
        else:
            self._put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> ObjectInfo:
        check_key(key)
        return self._put_conditionally(key, data, None, "expected no object there")

    def put_if_match(self, key: str, data: bytes, version: str) -> ObjectInfo:
        check_key(key)
        return self._put_conditionally(key, data, version, f"expected its version {version}")

    def writer(self, key: str) -> ObjectWriterInParts:
        check_key(key)
        return ObjectWriterInParts(self._client, key, lambda data: self._put(key, data), self.budgets.writes)

    def delete(self, key: str) -> None:
        check_key(key)

        def delete() -> None:
            try:
                self._client.delete(key)
            except ObjectNotFound:  # which some stores say and some do not
                return

        self._write(delete, key)
        reach("storage.after_delete", key)

    def discard_unfinished(self, prefix: str = "") -> int:
        """Nothing here: a write is one request, and parts of a killed upload can be neither seen nor removed."""
        check_prefix(prefix)
        return 0

    def exclusive(self, name: str, *, purpose: str) -> AbstractContextManager[StillHeld]:
        return leased(self._client, name, purpose=purpose, budget=self.budgets.metadata)

    def _put(self, key: str, data: bytes) -> None:
        reach("storage.before_rename", key)
        self._write(lambda: self._client.put(key, data), key)
        reach("storage.after_put", key)

    def _put_conditionally(self, key: str, data: bytes, version: str | None, expected: str) -> ObjectInfo:
        """Put by a condition. A try whose answer was lost may have succeeded, so that the next finds its own object
        there: its mark tells."""
        mark = secrets.token_hex(16)
        tries, is_taken = 0, False

        def attempt() -> ObjectInfo:
            nonlocal tries, is_taken
            tries += 1
            if not is_taken:
                try:
                    return self._client.put(key, data, if_absent=version is None, replacing=version, mark=mark)
                except (PreconditionFailed, ObjectNotFound) as error:
                    if tries == 1:
                        raise PreconditionFailed(f"{error}: {expected}") from None
                    is_taken = True
            try:
                found, info = self._client.marked(key)
            except ObjectNotFound:
                found, info = "", ObjectInfo(key, 0)
            if found == mark:
                return info
            raise PreconditionFailed(
                f"{self._what(key)} is another's by now: {expected}; an earlier try, whose answer was lost, may "
                "have been there before it"
            )

        reach("storage.before_rename", key)
        info = self._write(attempt, key)
        reach("storage.after_put", key)
        return info

    def _write(self, operation: Callable[[], T], key: str) -> T:
        return with_retries(operation, self.budgets.writes, self._what(key))

"""Writing an object piece by piece: small ones in one request at the end, large ones in parts as they come."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.errors import AccessDenied, ObjectNotFound, StorageError, TransientStoreError
from penstock.faults import reach
from penstock.storage.client import ObjectClient
from penstock.storage.connection import call
from penstock.storage.retry import RetryBudget, with_retries

PART_BYTES = 8 << 20
"""Of an upload whose length is not known; 10 000 of them are the most there can be: 78 GiB."""
_MOST_PARTS = 10_000
_PARALLEL = 4


def part_bytes(size_bytes: int) -> int:
    """How large the parts of an upload of a known length are: all the same, and not too many."""
    return max(PART_BYTES, -(-size_bytes // (_MOST_PARTS - 1)))


class ObjectWriterInParts:
    """Collects what is written until it is worth a part. Then an upload begins, of which nothing is seen until its end.

    Memory is bounded by a few parts. An exception ends the upload and leaves nothing; a killed process may leave parts
    that nobody sees and that a lifecycle rule of the bucket removes. A part that fails is sent again within `budget`.
    """

    def __init__(
        self,
        client: ObjectClient,
        key: str,
        put: Callable[[bytes], None],
        budget: RetryBudget,
        size_of_part: int = PART_BYTES,
    ) -> None:
        self._client = client
        self._key = key
        self._put = put
        self._budget = budget
        self._part_bytes = size_of_part
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._upload: Any = None
        self._entered = False
        self._mark = secrets.token_hex(16)

    def write(self, data: bytes) -> None:
        assert self._entered, "write inside the with block"
        self._pieces.append(bytes(data))
        self._held_bytes += len(data)
        if self._upload is not None or self._held_bytes > self._part_bytes:
            self._send()

    def __enter__(self) -> ObjectWriterInParts:
        self._client.address.path(self._key)
        self._entered = True
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self._entered = False
        if exc_type is not None:
            self._give_up()
        elif self._upload is None:
            data, self._pieces = b"".join(self._pieces), []
            self._put(data)
        else:
            reach("storage.before_rename", self._key)
            self._finish()
            reach("storage.after_put", self._key)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._client.upload(
                self._key, self._budget, part_bytes=self._part_bytes, parallel=_PARALLEL, mark=self._mark
            )
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        upload = self._upload
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), self._part_bytes):  # more at once would all be sent at once
                part = view[start : start + self._part_bytes]
                call(lambda part=part: upload.write(part), self._client.what(self._key))

    def _finish(self) -> None:
        """Make the object visible. Where the answer to that was lost, asking again finds no upload: its mark tells."""
        upload, self._upload = self._upload, None
        what = self._client.what(self._key)
        try:
            call(upload.close, what)
        except AccessDenied:
            raise
        except StorageError as error:
            if not with_retries(self._is_there, self._budget, what):
                raise TransientStoreError(f"{what}: the upload failed, and nothing was written: {error}") from error

    def _is_there(self) -> bool:
        try:
            return self._client.marked(self._key)[0] == self._mark
        except ObjectNotFound:
            return False

    def _give_up(self) -> None:
        upload, self._upload = self._upload, None
        self._pieces = []
        if upload is not None:
            with suppress(StorageError):  # the first error is the one to tell; parts left behind are never seen
                call(lambda: upload.__exit__(StorageError, None, None), self._client.what(self._key))

"""Files behind HTTP: read by ranges, going on where a connection broke."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import AccessDenied, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage.retry import DATA, Patience, RetryBudget, parse_retry_after

if TYPE_CHECKING:
    import httpx2

_FIRST_RANGE_BYTES = 1 << 20
_LARGEST_RANGE_BYTES = 64 << 20
_TRANSIENT = {408, 425, 429}
_URL = re.compile(r"(?P<scheme>\bhttps?://)([^\s/?#'\"<>@]*@)?(?P<place>[^\s?#'\"<>]*)([?#][^\s'\"<>]*)?")
TIMEOUT_S = 60.0

Headers = Callable[[], dict[str, str]]


def redacted(text: str) -> str:
    """A text whose URLs tell neither a password nor a query: a signed URL opens a file to whoever reads it."""
    return _URL.sub(r"\g<scheme>\g<place>", text)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """A failed request in the storage contract's words; the URL stays out of it, it may be signed."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException as error:
        raise TransientStoreError(f"{what}: no answer in {TIMEOUT_S:.0f} s ({type(error).__name__})") from error
    except httpx2.TransportError as error:
        raise TransientStoreError(f"{what}: the connection failed ({_told(error)})") from error
    except httpx2.HTTPError as error:
        raise StorageError(f"{what}: the request failed ({_told(error)})") from error
    except httpx2.InvalidURL as error:
        raise StorageError(f"{what}: its URL cannot be one ({type(error).__name__})") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {redacted(str(error))}"


def refuse_bad_status(response: httpx2.Response, what: str, *, when_denied: str = "") -> None:
    """Raise what a status code means; 2xx and nothing else is success."""
    status = response.status_code
    if 200 <= status < 300:
        return
    if status in _TRANSIENT or status >= 500:
        asked_s = parse_retry_after(response.headers.get("retry-after"))
        raise TransientStoreError(f"{what}: the server answered {status}", retry_after_s=asked_s)
    if status in (401, 403):
        raise AccessDenied(f"{what}: the server answered {status}" + (f": {when_denied}" if when_denied else ""))
    if status in (404, 410):
        raise ObjectNotFound(f"{what}: there is no such thing (the server answered {status})")
    raise StorageError(f"{what}: the server answered {status}: expected 200")


class WebFile(io.RawIOBase):
    """One remote file, by ranges that grow while reading goes on: a footer costs little, a whole file few requests.

    A broken connection is taken up again at the byte it broke at. What is read must be `size_bytes` long: a body that
    ends early is a failure, never the end of the file.
    """

    def __init__(
        self,
        client: Callable[[], httpx2.Client],
        url: str,
        *,
        what: str,
        size_bytes: int,
        headers: Headers,
        start: int = 0,
        budget: RetryBudget = DATA,
        when_denied: str = "",
    ) -> None:
        super().__init__()
        self._client = client
        self._url = url
        self._what = what
        self._size_bytes = size_bytes
        self._headers = headers
        self._when_denied = when_denied
        self._position = start
        self._range_bytes = _FIRST_RANGE_BYTES
        self._asked_until = start
        self._patience = Patience(budget=budget, what=what)
        self._response: httpx2.Response | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        target = bases[whence] + offset if whence in bases else -1
        if target < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._what)
        if target != self._position:
            self._hang_up()
            self._position = target
            self._range_bytes = _FIRST_RANGE_BYTES
        return target

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")
        if not len(wanted) or self._position >= self._size_bytes:
            return 0
        while True:
            try:
                piece = self._next_piece(len(wanted))
            except TransientStoreError as error:
                self._hang_up()
                self._patience.spend(error)
                continue
            except StorageError:
                self._hang_up()  # whoever reads on all the same asks anew
                raise
            count = min(len(piece), len(wanted))
            wanted[:count] = piece[:count]
            self._piece = piece[count:]
            self._position += count
            self._patience.refresh(count)
            return count

    def close(self) -> None:
        self._hang_up()
        super().close()

    def _next_piece(self, wanted: int) -> memoryview:
        """Some bytes from where we stand; at least one."""
        while not len(self._piece):
            if self._response is None:
                self._ask(max(wanted, self._range_bytes))
                self._range_bytes = min(_LARGEST_RANGE_BYTES, self._range_bytes * 4)
            with translated(self._what):
                piece = next(self._pieces, None)
            if piece is None:
                ended_early = self._position < self._asked_until
                self._hang_up()
                if ended_early:
                    raise TransientStoreError(f"{self._what}: the answer broke off at byte {self._position}")
            else:
                # An answer may hold more than was asked for; the file does not.
                self._piece = memoryview(piece)[: self._size_bytes - self._position]
        return self._piece

    def _ask(self, length: int) -> None:
        stop = min(self._size_bytes, self._position + length)
        headers = {**self._headers(), "Accept-Encoding": "identity", "Range": f"bytes={self._position}-{stop - 1}"}
        with translated(self._what):
            client = self._client()
            request = client.build_request("GET", self._url, headers=headers, timeout=TIMEOUT_S)
            response = client.send(request, stream=True, follow_redirects=True)
        self._response = response
        refuse_bad_status(response, self._what, when_denied=self._when_denied)
        self._pieces = response.iter_raw()  # as they arrive: gathered ones are lost with a broken connection
        self._asked_until = stop
        self._refuse_packed(response)
        if response.status_code != 206:  # the whole file, where the server knows no ranges
            self._check_length(response.headers.get("content-length"))
            self._asked_until = self._size_bytes
            self._pieces = _without_first(self._pieces, self._position)
        else:
            self._check_range(response.headers.get("content-range", ""))

    def _refuse_packed(self, response: httpx2.Response) -> None:
        """Refuse bytes that are not the file's own: none of the places counted here would hold in them."""
        packed = response.headers.get("content-encoding", "identity")
        if packed != "identity":
            raise StorageError(f"{self._what}: asked for the file as it is, got it packed as {packed!r}")

    def _check_length(self, told: str | None) -> None:
        if told is not None and told != str(self._size_bytes):
            raise StorageError(
                f"{self._what}: expected {self._size_bytes} bytes, got an answer of {told}: the file changed"
            )

    def _check_range(self, told: str) -> None:
        """Refuse bytes of another place or of another file."""
        first = told.removeprefix("bytes ").partition("-")[0]
        total = told.rpartition("/")[2]
        if first != str(self._position) or total not in ("*", str(self._size_bytes)):
            raise StorageError(
                f"{self._what}: asked for bytes from {self._position} of {self._size_bytes}, got {told!r}: "
                "the file changed, or the server cannot be trusted with ranges"
            )

    def _hang_up(self) -> None:
        response, self._response = self._response, None
        self._pieces = iter(())
        self._piece = memoryview(b"")
        if response is not None:
            with suppress(StorageError), translated(self._what):  # of what is not wanted any more
                response.close()


def _without_first(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    for piece in pieces:
        if count < len(piece):
            yield piece[count:]
            count = 0
        else:
            count -= len(piece)

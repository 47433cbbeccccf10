"""Objects over plain HTTP: from the socket straight into the bytes that are handed out.

Inside a cluster, where stores speak HTTP without TLS, a link can be faster than the copies that a client library makes
of a body. obstore signs the address, a socket does the rest; an answer that is out of the ordinary is left to obstore.
With TLS obstore reads, whose threads decrypt without the interpreter's lock.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.errors import TransientStoreError
from penstock.storage.address import StoreAddress
from penstock.storage.connection import Timeouts
from penstock.storage.plain_answer import Connection, PlainAnswer
from penstock.storage.secret import Secret

_SIGNED_WITH = {
    "access_key_id",
    "aws_endpoint_url_s3",
    "checksum_algorithm",
    "default_region",
    "endpoint",
    "region",
    "secret_access_key",
    "session_token",
    "unsigned_payload",
    "virtual_hosted_style_request",
}
"""Options that an address holds once it is signed; others may want headers of their own."""
_IDLE_S = 30.0
"""A connection that was idle for longer is not trusted."""


def speaks_plainly(address: StoreAddress) -> bool:
    """Whether objects there can be read so."""
    endpoint = address.endpoint or ""
    if address.scheme != "s3" or not endpoint.startswith("http://") or not set(address.options) <= _SIGNED_WITH:
        return False
    if os.environ.get("AWS_SKIP_SIGNATURE"):
        return False
    proxies = getproxies()
    if not ("http" in proxies or "all" in proxies):
        return True
    return bool(proxy_bypass(urlsplit(endpoint).hostname or ""))


class PlainReads:
    """Reads from one store. Shared by threads, each of which has a connection while it reads; not for forks."""

    def __init__(self, sign: Callable[[str, str], str], timeouts: Timeouts) -> None:
        self._sign = sign
        """The signed address of an object, by its path and its name for messages."""
        self._timeouts = timeouts
        self._idle: deque[Connection] = deque()
        weakref.finalize(self, _close_all, self._idle)

    def get(self, path: str, what: str, options: Mapping[str, Any]) -> PlainAnswer | None:
        """The answer to a request with the options of obstore's `get`, up to where its body begins; None for one that
        is not for us to understand."""
        host, port, request = self._request(path, what, options)
        answer = PlainAnswer(self._connection(host, port, what), what, self._timeouts, self._idle)
        try:
            if answer.begin(request, options):
                return answer
        except BaseException:
            answer.close()
            raise
        answer.close()
        return None

    def _request(self, path: str, what: str, options: Mapping[str, Any]) -> tuple[str, int, Secret]:
        """Whom to ask, and what to say: it is signed, so it is kept out of sight."""
        fields = ["Accept-Encoding: identity"]
        wanted = options.get("range")
        if isinstance(wanted, tuple):
            fields.append(f"Range: bytes={wanted[0]}-{wanted[1] - 1}")
        elif wanted is not None:
            fields.append(f"Range: bytes={wanted['offset']}-")
        if "if_match" in options:
            fields.append(f"If-Match: {options['if_match']}")
        parts = urlsplit(self._sign(path, what))
        lines = [f"GET {parts.path}?{parts.query} HTTP/1.1", f"Host: {parts.netloc}", *fields, "", ""]
        return parts.hostname or "", parts.port or 80, Secret("\r\n".join(lines))

    def _connection(self, host: str, port: int, what: str) -> socket.socket:
        while self._idle:
            with suppress(IndexError):  # another thread was faster
                found, used_at = self._idle.pop()
                if time.monotonic() - used_at < _IDLE_S and _is_open(found):
                    return found
                found.close()
        try:
            made = socket.create_connection((host, port), self._timeouts.connect_s)
        except TimeoutError:
            raise TransientStoreError(f"{what}: no answer in time") from None
        except OSError as error:
            told = " (connection refused)" if isinstance(error, ConnectionRefusedError) else ""
            raise TransientStoreError(f"{what}: cannot be reached{told}") from None
        made.settimeout(None)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The system's own time-out: one of Python's would look before every read. Half of it, since a read that waits
        # for all it was asked for may wait once more after the last byte.
        half = self._timeouts.read_s / 2
        within = struct.pack("ll", int(half), int(half % 1 * 1e6))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, within)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, within)
        return made


def _is_open(connection: socket.socket) -> bool:
    """Whether an idle connection still serves: one that has something to say is about to be closed."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _close_all(idle: deque[Connection]) -> None:
    while idle:
        idle.pop()[0].close()

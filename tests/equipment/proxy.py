"""An HTTP server on loopback that passes requests on to another and makes trouble on the way."""

from __future__ import annotations

import http.client
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_PASSED_ON_BY_ITSELF = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass
class Trouble:
    """What happens to requests, each by chance; may be changed while the proxy runs."""

    status: float = 0.0
    """Answered with `status_code`, not passed on."""
    status_code: int = 503
    cut: float = 0.0
    """Passed on; the connection is cut in the middle of the answer's body."""
    lost: float = 0.0
    """Passed on; the connection is cut before the answer."""
    stall: float = 0.0
    """Passed on after `stall_s` seconds."""
    stall_s: float = 2.0
    dead: bool = False
    """Every connection is cut."""
    hangs: bool = False
    """No request is ever answered."""
    only: str = ""
    """A regular expression that ``METHOD path`` must match for trouble to be made."""
    times: int = sys.maxsize
    """How often, at most, trouble is made by chance."""


@dataclass
class Proxy:
    """A running proxy."""

    to: str
    url: str = ""
    trouble: Trouble = field(default_factory=Trouble)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers in lower case of each request, troubled or not."""
    made: Counter[str] = field(default_factory=Counter)
    """How often each trouble was made."""
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, request: str) -> str:
        """The trouble that a request gets, empty for none."""
        with self.lock:
            made = self.made.total() - self.made[""]
            if self.trouble.dead or self.trouble.hangs:
                drawn = "dead" if self.trouble.dead else "hangs"
            elif not re.search(self.trouble.only, request) or made >= self.trouble.times:
                drawn = ""
            else:
                drawn, left = "", self.chance.random()
                for name in ("status", "cut", "lost", "stall"):
                    share = getattr(self.trouble, name)
                    if left < share:
                        drawn = name
                        break
                    left -= share
            self.made[drawn] += 1
            return drawn


@contextmanager
def faulty_proxy(to: str, **trouble: Any) -> Iterator[Proxy]:
    """A proxy before the server at `to` until the block ends."""
    proxy = Proxy(to, trouble=Trouble(**trouble))

    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that hung up, or was killed
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass

    def do_GET(self) -> None:
        self._pass_on()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the base class calls them so

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = self.path.partition("?X-Amz-")[0]  # without its signature, where that is part of it
        drawn = self.proxy.draw(f"{self.command} {asked}")
        with self.proxy.lock:
            self.proxy.requests.append((self.command, asked, headers))
        if drawn == "hangs":
            self.proxy.ended.wait(600)
        if drawn in ("dead", "hangs"):
            self.close_connection = True
        elif drawn == "status":
            self._send(self.proxy.trouble.status_code, {}, b"<Error><Code>SlowDown</Code></Error>")
        else:
            if drawn == "stall":
                time.sleep(self.proxy.trouble.stall_s)
            self._answer(body, drawn)

    def _answer(self, body: bytes, drawn: str) -> None:
        upstream = urlsplit(self.proxy.to)
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):  # nobody there: neither are we
            self.close_connection = True
            return
        finally:
            connection.close()
        if drawn == "lost":
            self.close_connection = True
            return
        told = {name: value for name, value in answer.getheaders() if name.lower() not in _PASSED_ON_BY_ITSELF}
        length = answer.getheader("content-length") if self.command == "HEAD" else str(len(data))
        self._send(answer.status, told, data, length=length, cut=drawn == "cut")

    def _send(
        self, status: int, headers: dict[str, str], data: bytes, *, length: str | None = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": length or str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.close_connection = True

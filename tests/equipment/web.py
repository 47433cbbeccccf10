"""A plain web server on loopback: files with ranges and ETags, as most have them, and with neither, as some."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass
class WebServer:
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """By path, without the leading slash; may be changed at any time."""
    modified: dict[str, str] = field(default_factory=dict)
    etags: str = "strong"
    """``strong``, ``weak`` or ``none``."""
    requests: list[str] = field(default_factory=list)


@contextmanager
def web_server(**settings: Any) -> Iterator[WebServer]:
    """A server until the block ends."""
    web = WebServer(**settings)

    class Handler(_Handler):
        pass

    Handler.web = web
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    web: WebServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass

    def do_GET(self) -> None:
        path = unquote(self.path).lstrip("/")
        self.web.requests.append(f"{self.command} {path} {self.headers.get('range', '')}".strip())
        data = self.web.files.get(path)
        if data is None:
            self._send(404, b"", {})
            return
        told = {"Last-Modified": self.web.modified.get(path, "Tue, 04 Feb 2025 10:00:00 GMT"), "Accept-Ranges": "bytes"}
        if self.web.etags != "none":
            told["ETag"] = ("W/" if self.web.etags == "weak" else "") + f'"{hashlib.md5(data).hexdigest()}"'
        wanted = self.headers.get("if-match")
        if wanted is not None and (self.web.etags == "weak" or wanted != told.get("ETag")):
            self._send(412, b"", {})
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if found is None:
            self._send(200, data, told)
            return
        first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        if first >= len(data):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self._send(206, data[first : last + 1], {**told, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    do_HEAD = do_GET  # noqa: N815 - the base class calls it so

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

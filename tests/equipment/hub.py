"""A Hub on loopback: the requests that reading and searching take, answered from a folder of repositories."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3
"""Files a page of a listing, so that every repository has several."""


@dataclass
class Fault:
    """What happens to the next requests whose path contains a word."""

    word: str
    times: int
    status: int = 0
    """Answer with this status and nothing else; 0 lets the answer pass, cut in the middle of its body."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer; where it is let pass, instead of its own."""
    cut: bool = True
    """Whether an answer that is let pass breaks off."""


@dataclass
class Repository:
    """One data set or model: commits by name, each a folder of files."""

    commits: dict[str, Path]
    branches: dict[str, str]
    tags: list[str] = field(default_factory=list)
    private: bool = False
    gated: bool = False
    """Whether everybody may know of it, and only some may read it."""


@dataclass
class Hub:
    """A running Hub. `repositories` may be changed while it runs."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """Data sets."""
    models: dict[str, Repository] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    ranges: bool = True
    """Whether it knows ranges; else every answer is the whole file."""
    requests: Counter[str] = field(default_factory=Counter)
    """How often each path was asked for."""
    sent: list[dict[str, str]] = field(default_factory=list)
    """The headers of each request, in lower case."""
    gates: dict[str, threading.Event] = field(default_factory=dict)
    """Requests whose path contains a word wait for an event."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """What listings tell of besides the files that are there."""
    next_page_at: str | None = None
    """Where the next page of a listing is said to be, where that is not this server."""
    elsewhere: str | None = None
    """Where files really are: another server that a request for one is sent to."""

    def add(self, name: str, folder: Path, *, model: bool = False, **more: Any) -> str:
        """Publish a folder as a repository's newest commit; returns the commit."""
        content = b"".join(
            f"{path.relative_to(folder)}".encode() + path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
        commit = hashlib.sha1(content).hexdigest()
        found = (self.models if model else self.repositories).setdefault(name, Repository({}, {}, **more))
        found.commits[commit] = folder
        found.branches["main"] = commit
        return commit

    def commit_of(self, repository: Repository, revision: str) -> str | None:
        commit = repository.branches.get(revision, revision)
        return commit if commit in repository.commits else None


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A Hub that answers on loopback until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(body)

    def _answer(self, body: bytes = b"") -> None:
        path = urlsplit(self.path).path
        self.hub.requests[path] += 1
        self.hub.sent.append({name.lower(): value for name, value in self.headers.items()})
        for word, gate in self.hub.gates.items():
            if word in path:
                gate.wait(60)
        fault = next((fault for fault in self.hub.faults if fault.times and fault.word in path), None)
        if fault is not None:
            fault.times -= 1
            if fault.status:
                self._send(fault.status, b'{"error": "as told"}', fault.headers)
                return
        parts = unquote(path).strip("/").split("/")
        if parts == ["api", "datasets"]:
            self._search()
        elif parts[0] == "api" and parts[1] in ("datasets", "models"):
            self._api(parts[1], parts[2:], body)
        elif "resolve" in parts:
            at = parts.index("resolve")
            kind, first = ("datasets", 1) if parts[0] == "datasets" else ("models", 0)
            self._file(kind, "/".join(parts[first:at]), parts[at + 1], "/".join(parts[at + 2 :]), fault)
        else:
            self._send(404, b"{}")

    def _search(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        word = query.get("search", [""])[0]
        wanted = query.get("filter", [])
        found = [
            {"id": name, "downloads": 7, "likes": 1, "tags": repository.tags, "gated": False, "private": False}
            for name, repository in sorted(self.hub.repositories.items())
            if word in name and all(tag in repository.tags for tag in wanted)
        ]
        self._send(200, json.dumps(found[: int(query.get("limit", ["100"])[0])]).encode())

    def _api(self, kind: str, parts: list[str], body: bytes) -> None:
        verb = next((word for word in ("revision", "tree", "paths-info") if word in parts), None)
        at = parts.index(verb) if verb else len(parts)
        name = "/".join(parts[:at])
        if name in self.hub.renamed:
            target = "/".join(["", "api", kind, self.hub.renamed[name], *parts[at:]])
            self._send(307, b"", {"Location": target})
            return
        repository = self._repository(kind, name)
        if repository is None:
            return
        revision = "/".join(parts[at + 1 :]) if verb == "revision" else parts[at + 1] if verb else "main"
        commit = self.hub.commit_of(repository, revision)
        if commit is None:
            self._send(404, b'{"error": "no such revision"}', {"X-Error-Code": "RevisionNotFound"})
            return
        if verb in (None, "revision"):
            files = [{"rfilename": str(path)} for path in _files(repository.commits[commit])]
            told = {"id": name, "sha": commit, "tags": repository.tags, "siblings": files, "private": False}
            self._send(200, json.dumps(told).encode())
        elif verb == "tree":
            self._tree(f"{kind}/{name}", repository.commits[commit], commit, "/".join(parts[at + 2 :]))
        else:
            wanted = json.loads(body)["paths"]
            entries = [entry for entry in _entries(repository.commits[commit]) if entry["path"] in wanted]
            self._send(200, json.dumps(entries).encode())

    def _tree(self, name: str, folder: Path, commit: str, below: str) -> None:
        query = parse_qs(urlsplit(self.path).query)
        entries = [entry for entry in _entries(folder) if entry["path"].startswith(below)] + self.hub.listed
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + PAGE < len(entries):
            where = self.hub.next_page_at or self.hub.url
            following = f"{where}/api/{name}/tree/{commit}?recursive=true&cursor={first + PAGE}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._send(200, json.dumps(entries[first : first + PAGE]).encode(), headers)

    def _file(self, kind: str, name: str, revision: str, key: str, fault: Fault | None) -> None:
        repository = self._repository(kind, name)
        if repository is None:
            return
        if repository.gated and "authorization" not in self.headers:
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        commit = self.hub.commit_of(repository, revision)
        path = repository.commits[commit] / key if commit else Path()
        if commit is None or not path.is_file():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        if self.hub.elsewhere:
            self._send(302, b"", {"Location": f"{self.hub.elsewhere}{self.path}"})
            return
        data = path.read_bytes()
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, asked = 200, self.headers.get("range")
        if asked and self.hub.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            stop = min(len(data), int(last) + 1) if last else len(data)
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            data, status = data[int(first) : stop], 206
        self._send(status, data, {**headers, **(fault.headers if fault else {})}, cut=fault is not None and fault.cut)

    def _repository(self, kind: str, name: str) -> Repository | None:
        found = (self.hub.models if kind == "models" else self.hub.repositories).get(name)
        if found is None or (found.private and "authorization" not in self.headers):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.close_connection = True


def _files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _entries(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
        else:
            data = path.read_bytes()
            entry: dict[str, Any] = {"type": "file", "path": name, "oid": _oid(data), "size": len(data)}
            if path.suffix in (".parquet", ".gz"):  # what the Hub keeps as large files
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            found.append(entry)
    return found


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()

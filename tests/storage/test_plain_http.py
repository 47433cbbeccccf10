"""Objects read straight from a socket: whatever a server answers is understood, left to obstore, or told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from equipment.servers import S3Server
from penstock.errors import AccessDenied, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage import ObjectStorage
from penstock.storage.address import parse_address
from penstock.storage.client import ObjectClient
from penstock.storage.connection import Timeouts
from penstock.storage.partial import PartialRead
from penstock.storage.plain_http import PlainReads, speaks_plainly
from storage.conftest import MakeStore

Answer = Callable[[str], "list[bytes | float]"]
GIVEN = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
DATE = "Last-Modified: Mon, 16 Nov 2026 08:00:00 GMT\r\n"


def whole(body: bytes, more: str = "") -> bytes:
    head = f'HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nETag: "one"\r\n{DATE}{more}\r\n'
    return head.encode() + body


def failed(status: int, code: str = "", more: str = "") -> bytes:
    body = f"<Error><Code>{code}</Code></Error>"
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n{more}\r\n{body}".encode()


class Scripted:
    """A server that answers as told: bytes are sent lot by lot, a number is waited, an empty lot hangs up."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[str] = []
        self.connections = 0
        self.hung_up = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._open.append(connection)
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while self._answer(connection):
                pass
        self.hung_up += 1

    def _answer(self, connection: socket.socket) -> bool:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            if not (piece := connection.recv(65536)):
                return False
            request += piece
        self.requests.append(request.decode())
        for lot in self.answer(self.requests[-1]):
            if lot == b"":
                return False
            if isinstance(lot, bytes):
                connection.sendall(lot)
            else:
                time.sleep(lot)
        return True

    def wait_for_hang_ups(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while self.hung_up < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        self._listening.close()
        for connection in self._open:
            connection.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[Scripted, ObjectClient]]]:
    with ExitStack() as stack:

        def start(answer: Answer, **limits: float) -> tuple[Scripted, ObjectClient]:
            server = Scripted(answer)
            stack.callback(server.close)
            timeouts: Any = {"connect_s": 5.0, "read_s": 5.0, "whole_s": 20.0, **limits}
            address = parse_address("s3://bucket/below", {**GIVEN, "endpoint": server.url})
            return server, ObjectClient(address, Timeouts(**timeouts))

        yield start


def read(client: ObjectClient, *place: Any, **more: Any) -> PartialRead:
    partial = PartialRead(*place, **more)
    client.read_on("object", partial)
    return partial


def is_plain(request: str) -> bool:
    return "X-Amz-Signature=" in request and "authorization:" not in request.lower()


def test_a_whole_object_comes_as_the_bytes_it_arrived_in(serve: Any) -> None:
    server, client = serve(lambda _: [whole(b"abc")])
    got = read(client)
    assert got.joined() is got.pieces[0]
    assert got.joined() == b"abc"
    assert got.info is not None
    assert (got.info.size_bytes, got.info.version) == (3, '"one"')
    assert got.info.modified == "2026-11-16T08:00:00+00:00"
    assert is_plain(server.requests[0])
    assert server.requests[0].startswith("GET /bucket/below/object?")


def test_one_connection_serves_request_after_request(serve: Any) -> None:
    server, client = serve(lambda _: [whole(b"x" * 300_000)])
    assert [len(read(client).joined()) for _ in range(5)] == [300_000] * 5
    assert server.connections == 1


@pytest.mark.parametrize("how", ["told", "untold", "old", "late"])
def test_a_connection_that_the_server_closes_is_not_used_again(
    serve: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lots = {"told": [whole(b"abc", "Connection: close\r\n"), b""], "untold": [whole(b"abc"), b""]}
    server, client = serve(lambda _: lots.get(how, [whole(b"abc")]))
    if how == "old":
        monkeypatch.setattr("penstock.storage.plain_http._IDLE_S", 0.0)
    for count in (1, 2, 3):
        assert read(client).joined() == b"abc"
        if how == "untold":
            server.wait_for_hang_ups(count)
    assert server.connections == (1 if how == "late" else 3)


@pytest.mark.parametrize("cuts", [1, 7, 16, 40])
def test_an_answer_may_come_in_any_pieces(serve: Any, cuts: int) -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"a\r\n\r\nb" * 50)
    lots: list[bytes | float] = []
    for start in range(0, len(answer), cuts):
        lots += [answer[start : start + cuts], 0.0005]
    _, client = serve(lambda _: lots)
    assert read(client).joined() == b"a\r\n\r\nb" * 50
    assert read(client).joined() == b"a\r\n\r\nb" * 50


@pytest.mark.parametrize(
    ("place", "asked", "told"),
    [((2, 5), "bytes=2-4", "bytes 2-4/9"), ((2,), "bytes=2-", "bytes 2-8/9"), ((2, 99), "bytes=2-98", "bytes 2-8/9")],
)
def test_a_range_is_asked_for_and_what_came_is_compared(serve: Any, place: Any, asked: str, told: str) -> None:
    body = b"012345678"[2 : 5 if place == (2, 5) else None]
    head = f"HTTP/1.1 206 Partial\r\nContent-Length: {len(body)}\r\nContent-Range: {told}\r\nETag: e\r\n\r\n"
    server, client = serve(lambda _: [head.encode() + body])
    got = read(client, *place)
    assert got.joined() == body
    assert got.info is not None
    assert got.info.size_bytes == 9
    assert f"Range: {asked}\r\n" in server.requests[0]


def test_a_server_without_ranges_is_told(serve: Any) -> None:
    _, client = serve(lambda _: [whole(b"012345678")])
    with pytest.raises(StorageError, match="asked for a range, got the whole object"):
        read(client, 2, 5)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 206 P\r\nContent-Length: 9\r\nContent-Range: bytes 0-3/9\r\n\r\n012345678",
    ],
)
def test_a_broken_answer_is_a_passing_failure(serve: Any, answer: bytes) -> None:
    _, client = serve(lambda _: [answer, b""])
    with pytest.raises(TransientStoreError, match="the answer is broken"):
        read(client, 0, 9)


def test_an_answer_without_its_length_is_left_to_obstore(serve: Any) -> None:
    head = f'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: "one"\r\n{DATE}\r\n3\r\nabc\r\n0\r\n\r\n'.encode()
    server, client = serve(lambda asked: [head] if is_plain(asked) else [whole(b"abc")])
    assert read(client).joined() == b"abc"
    assert [is_plain(request) for request in server.requests] == [True, False]


def test_a_bucket_that_refuses_signed_addresses_is_read_through_obstore(serve: Any) -> None:
    server, client = serve(lambda asked: [failed(403, "AccessDenied") if is_plain(asked) else whole(b"abc")])
    assert read(client).joined() == b"abc"
    assert read(client).joined() == b"abc"
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "code", "error", "told"),
    [
        (403, "SignatureDoesNotMatch", AccessDenied, "the credentials are wrong"),
        (403, "RequestTimeTooSkewed", AccessDenied, "clock is wrong"),
        (404, "NoSuchKey", ObjectNotFound, "does not exist"),
        (404, "NoSuchBucket", StorageError, "no such bucket"),
        (503, "SlowDown", TransientStoreError, "503 SlowDown"),
        (500, "", TransientStoreError, "500"),
    ],
)
def test_what_a_status_means_is_told_after_one_request(
    serve: Any, status: int, code: str, error: type[Exception], told: str
) -> None:
    server, client = serve(lambda _: [failed(status, code)])
    with pytest.raises(error, match=told):
        read(client)
    assert len(server.requests) == 1


def test_how_long_a_server_asks_to_wait_is_told(serve: Any) -> None:
    _, client = serve(lambda _: [failed(503, "SlowDown", "Retry-After: 17\r\n")])
    with pytest.raises(TransientStoreError) as caught:
        read(client)
    assert caught.value.retry_after_s == 17.0


def test_a_failure_keeps_the_connection_and_an_endless_one_does_not_fill_memory(serve: Any) -> None:
    lots: list[Any] = [[failed(503)], [b"HTTP/1.1 503 No\r\nContent-Length: 9999999999\r\n\r\n" + b"x" * 100_000]]
    server, client = serve(lambda _: lots[min(len(server.requests), 3) // 3])
    for connections in (1, 1, 1, 2):
        with pytest.raises(TransientStoreError, match="503"):
            read(client)
        assert server.connections == connections


@pytest.mark.parametrize("length", ["many", "-1", "9" * 5000, ""])
def test_a_failure_whose_length_is_no_number_is_told_all_the_same(serve: Any, length: str) -> None:
    _, client = serve(lambda _: [f"HTTP/1.1 503 No\r\nContent-Length: {length}\r\n\r\n".encode(), b""])
    with pytest.raises(TransientStoreError, match="503"):
        read(client)


def test_an_object_said_to_be_larger_than_memory_is_told(serve: Any) -> None:
    _, client = serve(lambda _: [b"HTTP/1.1 200 OK\r\nContent-Length: 900000000000000000\r\nETag: e\r\n\r\n", b""])
    with pytest.raises(StorageError, match="no memory for its 900,000,000,000,000,000 bytes"):
        read(client)


def test_a_server_of_old_keeps_no_connection_that_it_does_not_name(serve: Any) -> None:
    server, client = serve(lambda _: [whole(b"abc").replace(b"HTTP/1.1", b"HTTP/1.0")])
    assert [read(client).joined() for _ in range(2)] == [b"abc"] * 2
    assert server.connections == 2


@pytest.mark.parametrize("silence", ["at once", "in the head", "in the body"])
def test_a_silent_server_is_given_up_and_what_came_is_kept(serve: Any, silence: str) -> None:
    lots = {"at once": b"H", "in the head": b"HTTP/1.1 200 OK\r\nContent-", "in the body": whole(b"abc" * 10)[:-20]}
    server, client = serve(lambda _: [lots[silence], 60.0], read_s=0.2)
    partial = PartialRead()
    with pytest.raises(TransientStoreError, match="no answer in time"):
        client.read_on("object", partial)
    assert partial.arrived == (10 if silence == "in the body" else 0)
    assert partial.joined() == b"abcabcabca"[: partial.arrived]
    assert len(server.requests) == 1


def test_an_answer_that_trickles_ends_at_its_deadline(serve: Any) -> None:
    _, client = serve(lambda _: [whole(b"x" * 1000)[:-1000], *[b"x", 0.05] * 1000], read_s=0.3, whole_s=1.0)
    partial = PartialRead()
    with pytest.raises(TransientStoreError, match="no answer in time"):
        client.read_on("object", partial)
    assert 0 < partial.arrived < 1000


def test_a_slow_answer_that_goes_on_is_waited_for(serve: Any) -> None:
    _, client = serve(lambda _: [whole(b"x" * 20)[:-20], *[b"x", 0.05] * 20], read_s=0.4)
    assert read(client).joined() == b"x" * 20


def test_a_cut_answer_goes_on_at_that_byte(serve: Any) -> None:
    body = bytes(range(250)) * 100
    rest = b'HTTP/1.1 206 P\r\nContent-Length: 15000\r\nContent-Range: bytes 10000-24999/25000\r\nETag: "one"\r\n\r\n'
    server, client = serve(lambda asked: [rest + body[10_000:]] if "Range:" in asked else [whole(body)[:-15_000], b""])
    partial = PartialRead()
    with pytest.raises(TransientStoreError, match="broke off at byte 10000"):
        client.read_on("object", partial)
    client.read_on("object", partial)
    assert partial.joined() == body
    assert 'If-Match: "one"\r\n' in server.requests[1]


def test_what_nobody_waits_for_is_hung_up(serve: Any) -> None:
    server, client = serve(lambda _: [whole(b"x" * 50_000_000)])
    partial = PartialRead()
    partial.is_abandoned = True
    client.read_on("object", partial)
    assert partial.arrived == 0
    assert len(read(client).joined()) == 50_000_000
    assert server.connections == 2


def test_connections_end_with_their_store(serve: Any) -> None:
    server, client = serve(lambda _: [whole(b"abc")])
    read(client)
    assert server.hung_up == 0
    del client
    server.wait_for_hang_ups(1)


@pytest.mark.parametrize(
    ("url", "options", "environment", "plainly"),
    [
        ("s3://b", {"endpoint": "http://10.0.0.1:9000"}, {}, True),
        ("s3://b", {}, {"AWS_ENDPOINT_URL": "http://10.0.0.1:9000"}, True),
        ("s3://b", {}, {}, False),
        ("s3://b", {"endpoint": "https://10.0.0.1:9000"}, {}, False),
        ("s3://b", {"endpoint": "http://10.0.0.1:9000", "skip_signature": True}, {}, False),
        ("s3://b", {"endpoint": "http://10.0.0.1:9000"}, {"AWS_SKIP_SIGNATURE": "true"}, False),
        ("s3://b", {"endpoint": "http://10.0.0.1:9000", "request_payer": True}, {}, False),
        ("s3://b", {"endpoint": "http://10.0.0.1:9000"}, {"http_proxy": "http://10.0.0.9:3128"}, False),
        ("s3://b", {"endpoint": "http://10.0.0.1"}, {"http_proxy": "http://10.0.0.9", "no_proxy": "10.0.0.1"}, True),
        ("http://10.0.0.1/data", {}, {}, False),
    ],
)
def test_only_plain_stores_are_read_so(
    url: str, options: Any, environment: dict[str, str], plainly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert speaks_plainly(parse_address(url, {**GIVEN, **options} if url.startswith("s3") else options)) is plainly


def test_both_ways_tell_the_same_of_an_object(
    make_store: MakeStore, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    store.put("folder/a +b%20c~ü'(=&?#).bin", b"012345678")
    key = "folder/a +b%20c~ü'(=&?#).bin"
    asked: list[str] = []
    original = PlainReads.get
    monkeypatch.setattr(
        PlainReads, "get", lambda self, path, *more: (asked.append(path), original(self, path, *more))[1]
    )
    plain = make_store()
    through = make_store()
    monkeypatch.setattr(ObjectClient, "_plain_reads", _only_for(plain, ObjectClient._plain_reads))
    for read_one in (
        lambda one: one.get_with_info(key),
        lambda one: one.get_range(key, 3, 99),
        lambda one: one.get_range_of(store.head(key), 2, 4),
    ):
        assert read_one(plain) == read_one(through)
    assert len(asked) == 3


def _only_for(store: ObjectStorage, original: Callable[..., PlainReads | None]) -> Callable[..., PlainReads | None]:
    return lambda client, inner: original(client, inner) if client is store._client else None

"""A file behind HTTP is read like one on disk: any part of it, through broken connections, and never short."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipment.hub import Fault, Hub, hub_server
from penstock.errors import AccessDenied, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage import web
from penstock.storage.retry import RetryBudget
from penstock.storage.web import WebFile, redacted

DATA = bytes(number * 31 % 251 for number in range(3000))
QUICK = RetryBudget(attempts=4, first_wait_s=0.001, longest_wait_s=0.002)
SECRET = "hf_secretsecretsecret"


class Served:
    """One file on a server, and how it was asked for."""

    def __init__(self, hub: Hub, folder: Path, client: httpx2.Client) -> None:
        self.hub = hub
        self.folder = folder
        self._client = client
        hub.add("org/name", folder)

    @property
    def path(self) -> str:
        return "/datasets/org/name/resolve/main/file.bin"

    @property
    def requests(self) -> int:
        return self.hub.requests[self.path]

    def raw(self, start: int = 0, size_bytes: int = len(DATA), path: str | None = None) -> WebFile:
        return WebFile(
            lambda: self._client,
            f"{self.hub.url}{path or self.path}?token={SECRET}",
            what="the file",
            size_bytes=size_bytes,
            headers=lambda: {"Authorization": f"Bearer {SECRET}"},
            start=start,
            budget=QUICK,
            when_denied="ask for access",
        )

    def open(self, start: int = 0, buffer_bytes: int = 16) -> io.BufferedReader:
        return io.BufferedReader(self.raw(start), buffer_bytes)

    def error(self, read: Callable[[WebFile], object] = lambda file: file.read()) -> StorageError:
        """What reading ends with; it never tells where the file is, nor a secret."""
        with pytest.raises(StorageError) as caught, self.raw() as file:
            read(file)
        assert SECRET not in str(caught.value)
        assert "127.0.0.1" not in str(caught.value)
        return caught.value


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client() as client:
        yield client


@pytest.fixture
def served(tmp_path: Path, client: httpx2.Client) -> Iterator[Served]:
    (tmp_path / "file.bin").write_bytes(DATA)
    (tmp_path / "empty.bin").write_bytes(b"")
    with hub_server() as hub:
        yield Served(hub, tmp_path, client)


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_FIRST_RANGE_BYTES", 100)
    monkeypatch.setattr(web, "_LARGEST_RANGE_BYTES", 700)


# Like a file

places = st.integers(-50, len(DATA) + 50)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(-1, 900), st.just(0)),
        st.tuples(st.just("readinto"), st.integers(0, 300), st.just(0)),
        st.tuples(st.just("seek"), places, st.sampled_from([io.SEEK_SET, io.SEEK_CUR])),
        st.tuples(st.just("seek"), st.integers(-len(DATA) - 50, 50), st.just(io.SEEK_END)),
    ),
    max_size=8,
)


def act(file: io.BufferedReader[Any], step: tuple[str, int, int]) -> object:
    """Do one step; returns what came of it and where the file stands then."""
    name, number, whence = step
    result: object
    try:
        if name == "seek":
            result = file.seek(number, whence)
        elif name == "read":
            result = file.read(number)
        else:
            buffer = bytearray(number)
            result = (file.readinto(buffer), bytes(buffer))
    except OSError as error:
        result = error.errno
    return result, file.tell()


@pytest.mark.usefixtures("small_ranges")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, start=st.integers(0, len(DATA) + 10), buffer_bytes=st.sampled_from([1, 64, 4096]))
def test_it_seeks_and_reads_as_a_plain_file_does(
    served: Served, steps: list[tuple[str, int, int]], start: int, buffer_bytes: int
) -> None:
    plain = io.BufferedReader(io.FileIO(served.folder / "file.bin"), buffer_bytes)
    plain.seek(start)
    with plain, served.open(start, buffer_bytes) as file:
        assert file.readable()
        assert file.seekable()
        for step in steps:
            assert act(file, step) == act(plain, step)


def test_a_seek_by_an_unknown_rule_is_refused(served: Served) -> None:
    with served.raw() as file, pytest.raises(OSError, match="Invalid argument"):
        file.seek(0, 9)


def test_a_closed_file_is_closed(served: Served) -> None:
    with served.open() as file:
        file.read(10)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_lines_are_lines(served: Served) -> None:
    with served.open() as file:
        assert list(file) == io.BytesIO(DATA).readlines()


@pytest.mark.usefixtures("small_ranges")
def test_reading_on_takes_few_requests_and_a_footer_takes_little(served: Served) -> None:
    with served.open() as file:
        assert b"".join(iter(lambda: file.read(30), b"")) == DATA
    # 100, then 400, then 700 at a time
    assert served.requests == 6
    ranges = [sent["range"] for sent in served.hub.sent]
    assert ranges[:3] == ["bytes=0-99", "bytes=100-499", "bytes=500-1199"]
    assert ranges[-1].endswith(f"-{len(DATA) - 1}")
    with served.open() as file:
        file.seek(-20, io.SEEK_END)
        assert file.read() == DATA[-20:]
    assert served.hub.sent[-1]["range"] == f"bytes={len(DATA) - 20}-{len(DATA) - 1}"
    assert served.requests == 7


def test_nothing_is_asked_for_before_it_is_needed_and_behind_the_end(served: Served) -> None:
    with served.open() as file:
        file.seek(0, io.SEEK_END)
        assert file.read(10) == b""
        file.seek(10, io.SEEK_END)
        assert file.read() == b""
    with served.raw(path="/datasets/org/name/resolve/main/empty.bin", size_bytes=0) as empty:
        assert empty.read() == b""
    assert served.hub.requests.total() == 0


def test_bytes_are_asked_for_as_they_are(served: Served) -> None:
    with served.open() as file:
        file.read()
    assert {sent["accept-encoding"] for sent in served.hub.sent} == {"identity"}


def test_a_server_without_ranges_is_read_all_the_same(served: Served) -> None:
    served.hub.ranges = False
    with served.open(700) as file:
        assert file.read() == DATA[700:]
        file.seek(2000)
        assert file.read(10) == DATA[2000:2010]
        file.seek(-1, io.SEEK_END)
        assert file.read() == DATA[-1:]


# Broken connections


@pytest.mark.parametrize("ranges", [True, False])
def test_a_body_cut_short_is_taken_up_where_it_broke(served: Served, ranges: bool) -> None:
    served.hub.ranges = ranges
    served.hub.faults.append(Fault("file.bin", 3))
    with served.open() as file:
        assert file.read() == DATA
    asked_from = [int(sent["range"].removeprefix("bytes=").partition("-")[0]) for sent in served.hub.sent]
    assert asked_from == ([0, 1500, 2250, 2625] if ranges else [0, 1500, 1500, 1500])


@pytest.mark.parametrize("ranges", [True, False])
def test_a_body_that_always_breaks_off_is_a_failure_and_never_the_end(served: Served, ranges: bool) -> None:
    served.hub.ranges = ranges
    served.hub.faults.append(Fault("file.bin", 10_000))
    error = served.error()
    assert isinstance(error, TransientStoreError)
    assert "given up after 4 tries" in str(error)


def test_an_answer_that_is_whole_but_short_is_taken_up_too(served: Served) -> None:
    served.hub.faults.append(Fault("file.bin", 1, headers={"Content-Length": "1500"}))
    with served.open() as file:
        assert file.read() == DATA
    assert [sent["range"] for sent in served.hub.sent] == ["bytes=0-2999", "bytes=1500-2999"]


def test_answers_without_a_single_byte_are_a_failure(served: Served) -> None:
    served.hub.faults.append(Fault("file.bin", 10_000, headers={"Content-Length": "0"}))
    with served.raw(start=len(DATA) - 1) as file, pytest.raises(TransientStoreError, match="broke off at byte 2999"):
        file.read()
    assert served.requests == 4


def test_a_file_shorter_than_told_is_a_failure_and_never_the_end(served: Served) -> None:
    (served.folder / "file.bin").write_bytes(DATA[:-1])
    assert "asked for bytes from 0 of 3000, got 'bytes 0-2998/2999'" in str(served.error())
    served.hub.ranges = False
    assert "expected 3000 bytes, got an answer of 2999: the file changed" in str(served.error())


def test_what_arrives_gives_patience_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.retry.PROGRESS_BYTES", 1)
    served.hub.faults.append(Fault("file.bin", 8))  # twice as many as the budget has tries; each brings some bytes
    with served.open() as file:
        assert file.read() == DATA


def test_a_server_that_breaks_off_after_every_few_bytes_is_given_up(served: Served) -> None:
    served.hub.faults.append(Fault("file.bin", 1000))
    assert "given up after 4 tries" in str(served.error())


# Statuses


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520])
def test_a_server_in_trouble_is_asked_again(served: Served, status: int) -> None:
    served.hub.faults.append(Fault("file.bin", 3, status, {"Retry-After": "0"}))
    with served.open() as file:
        assert file.read() == DATA
    assert served.requests == 4


def test_a_server_that_asks_for_too_much_patience_is_left(served: Served) -> None:
    served.hub.faults.append(Fault("file.bin", 1, 429, {"Retry-After": "3600"}))
    error = served.error()
    assert "the server asks to wait 3600 s: the server answered 429" in str(error)
    assert served.requests == 1


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, AccessDenied, "answered 401: ask for access"),
        (403, AccessDenied, "answered 403: ask for access"),
        (404, ObjectNotFound, "no such thing"),
        (410, ObjectNotFound, "no such thing"),
        (400, StorageError, "answered 400: expected 200"),
        (416, StorageError, "answered 416: expected 200"),
        (304, StorageError, "answered 304: expected 200"),
    ],
)
def test_an_answer_that_will_not_change_is_asked_for_once(
    served: Served, status: int, kind: type[StorageError], words: str
) -> None:
    served.hub.faults.append(Fault("file.bin", 1, status))
    error = served.error()
    assert type(error) is kind
    assert words in str(error)
    assert served.requests == 1


def test_a_server_that_is_not_there_is_told(served: Served) -> None:
    served.hub.url = "http://127.0.0.1:9"
    error = served.error()
    assert isinstance(error, TransientStoreError)
    assert "given up after 4 tries in 0 s: the connection failed (ConnectError" in str(error)


# Answers that cannot be trusted


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": "bytes 1-2999/3000"},
        {"Content-Range": "bytes 0-2999/3001"},
        {"Content-Range": "nonsense"},
        {"Content-Range": ""},
        {"Content-Encoding": "gzip"},
    ],
)
def test_bytes_of_another_place_are_refused_and_not_read_later(served: Served, headers: dict[str, str]) -> None:
    served.hub.faults.append(Fault("file.bin", 1, headers=headers, cut=False))
    with served.open() as file:
        with pytest.raises(StorageError, match="the file: asked for"):
            file.read(100)
        assert served.requests == 1
        assert file.read() == DATA
        assert served.requests == 2, "who reads on asks anew"


def test_a_total_that_is_not_known_is_no_lie(served: Served) -> None:
    served.hub.faults.append(Fault("file.bin", 1, headers={"Content-Range": "bytes 0-2999/*"}, cut=False))
    with served.open() as file:
        assert file.read() == DATA


# Redirects and secrets


def test_a_file_may_be_elsewhere_and_the_token_does_not_go_there(served: Served) -> None:
    with hub_server() as other:
        other.add("org/name", served.folder)
        served.hub.elsewhere = other.url
        with served.open() as file:
            assert file.read() == DATA
        assert [sent["authorization"] for sent in served.hub.sent] == [f"Bearer {SECRET}"]
        assert other.requests[served.path] == 1
        assert all("authorization" not in sent for sent in other.sent)


@pytest.mark.parametrize(
    "location", [f"http://127.0.0.1:9/x?Signature={SECRET}", f"ftp://x/?{SECRET}", f"http://[{SECRET}/", "/around"]
)
def test_a_redirect_that_leads_nowhere_is_told_without_where(served: Served, location: str) -> None:
    if location == "/around":
        location = served.path
    served.hub.faults.append(Fault("file.bin", 1000, 302, {"Location": location}))
    assert "the file: " in str(served.error())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("for url 'https://cdn/x/y.parquet?Signature=abc&Key=d'", "for url 'https://cdn/x/y.parquet'"),
        ("at http://user:word@host:8/p#f (see https://a/b)", "at http://host:8/p (see https://a/b)"),
        ("http://a?x=1 http://b/?y http://c", "http://a http://b/ http://c"),
        ("no URL, only a@b?c", "no URL, only a@b?c"),
    ],
)
def test_urls_are_told_without_what_opens_them(text: str, told: str) -> None:
    assert redacted(text) == told

"""Several endpoints are read in turn; one that fails costs nothing but its turn, and comes back when it is back."""

from __future__ import annotations

import logging
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pytest

from equipment.proxy import Proxy, faulty_proxy
from equipment.servers import S3Server
from penstock.errors import (
    AccessDenied,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
    TransientStoreError,
)
from penstock.storage import EndpointStorage, ReadableStorage, rotation
from penstock.storage.connection import Timeouts
from penstock.storage.retry import Budgets, RetryBudget
from penstock.storage.upload import ObjectWriterInParts
from storage.conftest import PATIENT, MakeStore

pytestmark = pytest.mark.alone

LARGE = random.Random(5).randbytes(6 << 20)
OBJECTS = {"small": b"small", "empty": b"", "large": LARGE}
BUCKETS = ("first", "second", "third")


def each(storage: EndpointStorage, field: str) -> list[object]:
    return [getattr(health, field) for health in storage.health()]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.fixture
def proxies(s3: S3Server, make_store: MakeStore) -> Iterator[list[Proxy]]:
    """Three endpoints, each with a bucket of its own that holds the same objects."""
    for bucket in BUCKETS:
        for key, data in OBJECTS.items():
            make_store(bucket=bucket).put(key, data)
    with ExitStack() as stack:
        yield [stack.enter_context(faulty_proxy(s3.url)) for _ in BUCKETS]


@pytest.fixture
def storage(proxies: list[Proxy], make_store: MakeStore) -> EndpointStorage:
    return make_endpoints(proxies, make_store)


def make_endpoints(
    proxies: list[Proxy], make_store: MakeStore, budgets: Budgets = PATIENT, **others: str
) -> EndpointStorage:
    """`others` are secrets other than the right one, by bucket."""
    timeouts = Timeouts(connect_s=1.0, read_s=0.5)
    return EndpointStorage(
        [
            make_store(bucket=bucket, url=proxy.url, secret=others.get(bucket), timeouts=timeouts)
            for bucket, proxy in zip(BUCKETS, proxies, strict=True)
        ],
        budgets=budgets,
    )


# In turn


def test_it_reads_like_any_other_store(storage: EndpointStorage, make_store: MakeStore) -> None:
    readable: ReadableStorage = storage
    single = make_store(bucket="first")
    assert readable.get("large") == LARGE
    assert readable.get_with_info("small")[0] == b"small"
    assert readable.get_with_info("empty") == (b"", single.head("empty"))
    assert readable.get_range("large", 5, 999_999) == LARGE[5:999_999]
    assert readable.get_range("empty", 3, 9) == readable.get_range("small", 2, 2) == b""
    assert readable.get_range("small", 1 << 63, 1 << 64) == b""
    with readable.reader("large", 7) as file:
        assert file.read() == LARGE[7:]
    assert readable.head("large").size_bytes == len(LARGE)
    assert (readable.exists("small"), readable.exists("missing")) == (True, False)
    assert [info.key for info in readable.list()] == [info.key for info in single.list()] == sorted(OBJECTS)
    assert [info.key for info in readable.list("s")] == ["small"]
    for bad in ("../x", "/x", ""):
        with pytest.raises(ConfigError, match="key"):
            readable.get(bad)


def test_requests_go_round_robin(storage: EndpointStorage, proxies: list[Proxy]) -> None:
    for _ in range(9):
        storage.get("small")
    assert [len(proxy.requests) for proxy in proxies] == [3, 3, 3]
    assert each(storage, "requests") == [3, 3, 3]
    for bucket, proxy in zip(BUCKETS, proxies, strict=True):
        assert {path.split("/")[1] for _, path, _ in proxy.requests} == {bucket}, "each has a bucket of its own"


def test_threads_share_the_turns(storage: EndpointStorage, proxies: list[Proxy]) -> None:
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: storage.get("small"), range(60))) == {b"small"}
    assert [len(proxy.requests) for proxy in proxies] == [20, 20, 20]


def read_and_tell(storage: EndpointStorage, path: str) -> None:
    Path(path).write_bytes(b"".join(storage.get("small") for _ in range(6)))


def test_a_spawned_process_reads_from_all_of_them(
    storage: EndpointStorage, proxies: list[Proxy], tmp_path: Path
) -> None:
    proxies[1].trouble.dead = True
    storage.get("small")
    process = multiprocessing.get_context("spawn").Process(target=read_and_tell, args=(storage, str(tmp_path / "t")))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "t").read_bytes() == b"small" * 6


def test_none_is_too_few() -> None:
    with pytest.raises(ConfigError, match="one or more"):
        EndpointStorage([])


# One fails


def test_everything_arrives_whole_through_trouble_on_all_of_them(
    storage: EndpointStorage, proxies: list[Proxy]
) -> None:
    for proxy in proxies:
        proxy.trouble.status, proxy.trouble.cut, proxy.trouble.stall = 0.2, 0.1, 0.01

    def read(number: int) -> bool:
        with storage.reader("large", number) as file:
            return file.read() == LARGE[number:] and storage.get("large") == LARGE and storage.get("small") == b"small"

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(12)))
    assert [info.key for info in storage.list()] == sorted(OBJECTS)
    assert all(proxy.made["status"] and proxy.made["cut"] for proxy in proxies)


def test_a_dead_one_is_passed_over_probed_and_taken_back(
    storage: EndpointStorage, proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rotation, "_LONGEST_PROBE_S", 0.2)
    proxies[0].trouble.dead = True
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            assert storage.get("small") == b"small"
        assert each(storage, "is_in") == [False, True, True]
        assert caplog.text.count("is left out until it answers again") == 1
        assert f"s3://first/{storage.url.split('/')[3].split(' ')[0]} at {proxies[0].url}" in caplog.text
        dead_for = len(proxies[0].requests)

        def is_probed() -> bool:
            storage.get("small")
            return len(proxies[0].requests) > dead_for

        wait_until(is_probed)
        assert proxies[0].requests[-1][0] == "HEAD"
        assert each(storage, "is_in")[0] is False, "probed in vain"
        proxies[0].trouble.dead = False

        def is_back() -> bool:
            storage.get("small")
            return each(storage, "is_in") == [True, True, True]

        wait_until(is_back)
        wait_until(lambda: "answers again and is asked in turn" in caplog.text)  # told a moment after it is so
        assert caplog.text.count("answers again and is asked in turn") == 1
    before = len(proxies[0].requests)
    for _ in range(6):
        storage.get("small")
    assert len(proxies[0].requests) == before + 2


def test_one_bad_moment_takes_nobody_out(storage: EndpointStorage, proxies: list[Proxy]) -> None:
    proxies[2].trouble.status, proxies[2].trouble.times = 1.0, 2
    for _ in range(12):
        storage.get("small")
    assert each(storage, "is_in") == [True, True, True]
    assert each(storage, "failures") == [0, 0, 2]


def test_one_that_never_answers_holds_up_few_requests(
    proxies: list[Proxy], make_store: MakeStore, storage: EndpointStorage
) -> None:
    proxies[1].trouble.hangs = True
    began = time.monotonic()
    for _ in range(30):
        assert storage.get("small") == b"small"
    assert each(storage, "failures")[1] == 3
    assert time.monotonic() - began < 20, "three time-outs, and then none"


# All fail


def test_with_all_of_them_dead_each_is_named_within_the_deadline(proxies: list[Proxy], make_store: MakeStore) -> None:
    budget = RetryBudget(attempts=1000, deadline_s=1.0, first_wait_s=0.01, longest_wait_s=0.2)
    storage = make_endpoints(proxies, make_store, Budgets(metadata=budget, data=budget))
    proxies[0].trouble.dead = True
    proxies[1].trouble.status, proxies[1].trouble.status_code = 1.0, 500
    proxies[2].trouble.hangs = True
    for read in (lambda: storage.get("small"), lambda: list(storage.list())):
        began = time.monotonic()
        with pytest.raises(TransientStoreError, match="given up") as caught:
            read()
        assert time.monotonic() - began < 1.0 + 3, "the deadline and the requests that were under way"
        for bucket, proxy in zip(BUCKETS, proxies, strict=True):
            assert f"s3://{bucket}/" in str(caught.value)
            assert proxy.url in str(caught.value)
        for answer in ("the connection broke off", "the store answered 500", "no answer "):
            assert answer in str(caught.value)
        assert "secret" not in str(caught.value)


def test_one_that_comes_back_in_time_saves_the_request(storage: EndpointStorage, proxies: list[Proxy]) -> None:
    for proxy in proxies:
        proxy.trouble.dead = True
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(storage.get, "small")
        wait_until(lambda: len(proxies[1].requests) >= 3)
        proxies[1].trouble.dead = False
        assert reading.result(30) == b"small"


# One refuses


def test_one_that_refuses_is_asked_once_and_told_loudly_and_reading_goes_on(
    proxies: list[Proxy], make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    storage = make_endpoints(proxies, make_store, second="wrong")
    with caplog.at_level(logging.WARNING):
        assert {storage.get("small") for _ in range(12)} == {b"small"}
    assert len(proxies[1].requests) == 1
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "s3://second/" in told[0].getMessage()
    assert "SignatureDoesNotMatch" in told[0].getMessage()
    assert "left out until it is mended" in told[0].getMessage()
    assert each(storage, "is_in") == [True, False, True]
    assert "SignatureDoesNotMatch" in str(each(storage, "last_failure")[1])


def test_with_all_of_them_refusing_it_is_refused_after_one_request_each(
    proxies: list[Proxy], make_store: MakeStore
) -> None:
    storage = make_endpoints(proxies, make_store, first="wrong", second="wrong", third="wrong")
    with pytest.raises(AccessDenied) as caught:
        storage.get("small")
    assert [len(proxy.requests) for proxy in proxies] == [1, 1, 1]
    assert str(caught.value).count("SignatureDoesNotMatch") == 3
    assert "wrong" not in str(caught.value).replace("the credentials are wrong", "")


def test_refused_here_and_dead_there_names_both_answers(proxies: list[Proxy], make_store: MakeStore) -> None:
    storage = make_endpoints(proxies, make_store, first="wrong")
    proxies[1].trouble.dead = proxies[2].trouble.dead = True
    with pytest.raises(TransientStoreError, match="SignatureDoesNotMatch") as caught:
        storage.get("small")
    assert "the connection broke off" in str(caught.value)
    assert len(proxies[0].requests) == 1, "what was refused is not asked again"
    assert len(proxies[1].requests) > 3


def test_a_bucket_that_is_not_there_is_told_loudly_and_reading_goes_on(
    proxies: list[Proxy], make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    stores = [make_store(bucket="no-such-bucket", url=proxies[0].url), make_store(bucket="first", url=proxies[1].url)]
    storage = EndpointStorage(stores, budgets=PATIENT)
    with caplog.at_level(logging.ERROR):
        assert {storage.get("small") for _ in range(4)} == {b"small"}
    assert "no such bucket" in caplog.text


# They differ


def test_what_one_misses_is_read_from_another_and_told(
    storage: EndpointStorage, make_store: MakeStore, proxies: list[Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    make_store(bucket="first").delete("small")
    with caplog.at_level(logging.WARNING):
        assert {storage.get("small") for _ in range(6)} == {b"small"}
    assert "s3://first/" in caplog.text
    assert "misses small" in caplog.text
    assert each(storage, "is_in") == [True, True, True]


def test_what_all_of_them_miss_is_not_there(storage: EndpointStorage, proxies: list[Proxy]) -> None:
    with pytest.raises(ObjectNotFound, match="missing"):
        storage.get("missing")
    assert [len(proxy.requests) for proxy in proxies] == [1, 1, 1]


def test_what_one_misses_while_the_others_are_dead_is_not_said_to_be_missing(
    proxies: list[Proxy], make_store: MakeStore
) -> None:
    make_store(bucket="first").delete("small")
    proxies[1].trouble.dead = proxies[2].trouble.dead = True
    with pytest.raises(TransientStoreError, match="does not exist"):
        make_endpoints(proxies, make_store).get("small")


def test_an_object_that_was_written_again_is_noticed_though_it_is_as_large(
    storage: EndpointStorage, make_store: MakeStore
) -> None:
    before = storage.head("large")
    for _ in BUCKETS:
        assert storage.get_range_of(before, 0, 9) == LARGE[:9]
    make_store(bucket="second").put("large", bytes(reversed(LARGE)))

    def read_from_each() -> None:
        for _ in BUCKETS:
            storage.get_range_of(before, 0, 9)

    with pytest.raises(PreconditionFailed, match=r"s3://second/.*large"):
        read_from_each()
    assert each(storage, "is_in") == [True, True, True]

    def read_here_and_there(file: BinaryIO) -> None:
        for start in range(0, len(LARGE), 2 << 20):
            file.seek(start)
            file.read(1)

    with storage.reader("large") as file:
        file.read(1)
        for bucket in BUCKETS:
            make_store(bucket=bucket).put("large", LARGE[1:] + LARGE[:1])
        with pytest.raises(PreconditionFailed):
            read_here_and_there(file)
    with storage.reader("large") as file:
        assert file.read() == LARGE[1:] + LARGE[:1], "who looks anew reads what is there"


def test_the_same_bytes_under_other_versions_are_the_same(
    storage: EndpointStorage, make_store: MakeStore, proxies: list[Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(bucket="second")
    with ObjectWriterInParts(store._client, "large", lambda _: None, PATIENT.writes, 5 << 20) as writer:
        writer.write(LARGE)
    assert store.head("large").version != make_store(bucket="first").head("large").version
    for proxy in proxies:
        proxy.trouble.cut = 0.3
    info = storage.head("large")
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            assert storage.get_range_of(info, 5, 4_000_000) == LARGE[5:4_000_000]
            assert storage.get("large") == LARGE
    assert "seems to be another object" not in caplog.text


def test_endpoints_that_name_different_digests_are_told_of_once(
    storage: EndpointStorage, make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    make_store(bucket="second").put("small", b"SMALL")
    info = storage.head("small")
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            storage.get_range_of(info, 0, 5)
    assert caplog.text.count("small seems to be another object on each endpoint") == 1
    assert "s3://second/" in caplog.text


def test_a_process_ends_while_requests_are_under_way_that_nobody_waits_for(
    proxies: list[Proxy], make_store: MakeStore, s3: S3Server, place: str
) -> None:
    proxies[0].trouble.hangs = True
    script = f"""
import sys
from penstock.storage import EndpointStorage, ObjectStorage
urls = {[proxy.url for proxy in proxies]!r}
given = dict(access_key_id="tester", secret_access_key="tester-secret")
stores = [ObjectStorage.from_url(f"s3://{{bucket}}/{place}", dict(given, endpoint=url))
          for bucket, url in zip({BUCKETS!r}, urls)]
storage = EndpointStorage(stores)
assert {{storage.get("small") for _ in range(6)}} == {{b"small"}}
assert storage._allowance.abandoned
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=25, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_halves_of_different_objects_are_never_joined(
    storage: EndpointStorage, make_store: MakeStore, proxies: list[Proxy]
) -> None:
    others = [LARGE, bytes(reversed(LARGE)), LARGE[:-1]]
    for bucket, data in zip(BUCKETS, others, strict=True):
        make_store(bucket=bucket).put("large", data)
    for proxy in proxies:
        proxy.trouble.cut = 0.4
    for _ in range(6):
        assert storage.get("large") in others

    def read_often() -> None:
        for _ in range(40):
            with storage.reader("large") as file:
                file.read(len(LARGE))

    with pytest.raises(StorageError, match="do not hold the same data"):
        read_often()

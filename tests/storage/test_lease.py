"""A lock on an object store ends with its holder, wherever that was, and a holder that lost it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from equipment.processes import held_open, pickled, python
from equipment.proxy import faulty_proxy
from equipment.servers import S3Server
from penstock.errors import StorageBusy
from penstock.storage import ObjectStorage, lease, open_storage
from penstock.storage.client import ObjectClient
from penstock.storage.connection import Timeouts
from storage.conftest import MakeStore
from storage.suite import HOLD, keys

LOCK = "lock.penstock-lock"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a second, so that a test sees one run out."""
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    monkeypatch.setattr(lease, "RENEW_S", 0.1)


@pytest.fixture
def store(make_store: MakeStore) -> Iterator[ObjectStorage]:
    store = make_store()
    yield store
    assert keys(store) == []


def client(store: ObjectStorage) -> ObjectClient:
    return ObjectClient(store.address, Timeouts())


def theirs(**changed: object) -> bytes:
    """The lock of somebody on another machine."""
    told = {"holder": "process 7 for sums on far", "machine": "far away", "pid": 7, "begun": "1", "token": "x"}
    told |= {"renewed": 5.0}
    return json.dumps({**told, **changed}).encode()


def take(store: ObjectStorage) -> None:
    with store.exclusive("lock", purpose="testing"):
        pass


def test_the_lock_of_a_dead_process_elsewhere_runs_out(store: ObjectStorage, quick: None) -> None:
    client(store).put(LOCK, theirs())
    began = time.monotonic()
    take(store)
    assert time.monotonic() - began >= 1.0
    began = time.monotonic()
    take(store)
    assert time.monotonic() - began < 1.0, "it was given back"


def test_a_living_process_elsewhere_keeps_its_lock(store: ObjectStorage, quick: None) -> None:
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            client(store).put(LOCK, theirs(renewal=number))

    renewing = threading.Thread(target=renew)
    client(store).put(LOCK, theirs())
    renewing.start()
    try:
        for _ in range(3):
            with pytest.raises(StorageBusy, match="in use by process 7 for sums on far"):
                take(store)
    finally:
        ended.set()
        renewing.join()


def test_a_holder_renews_for_as_long_as_it_takes(store: ObjectStorage, quick: None) -> None:
    with store.exclusive("lock", purpose="testing"):
        first = client(store).head(LOCK).version
        time.sleep(1.5)
        assert client(store).head(LOCK).version != first
    take(store)


@pytest.mark.parametrize("content", [b"", theirs(pid="x"), b"\xff"])
def test_a_lock_that_nobody_understands_runs_out_as_well(store: ObjectStorage, quick: None, content: bytes) -> None:
    client(store).put(LOCK, content)
    take(store)


def test_who_lost_the_lock_is_told_and_leaves_the_others_alone(store: ObjectStorage, quick: None) -> None:
    def work() -> None:
        with store.exclusive("lock", purpose="testing"):
            client(store).put(LOCK, theirs())
            time.sleep(0.5)

    with pytest.raises(StorageBusy, match="another process took it"):
        work()
    assert client(store).head(LOCK).size_bytes == len(theirs()), "theirs is still there"
    client(store).delete(LOCK)


def test_who_cannot_renew_for_too_long_is_told(make_store: MakeStore, s3: S3Server, quick: None) -> None:
    with faulty_proxy(s3.url) as proxy:
        store = make_store(url=proxy.url)

        def work() -> None:
            with store.exclusive("lock", purpose="testing"):
                proxy.trouble.dead = True
                time.sleep(1.2)
                proxy.trouble.dead = False

        with pytest.raises(StorageBusy, match="not renewed for 1 s"):
            work()
    take(make_store())  # it has run out, though the process that held it lives


def test_a_holder_can_ask_whether_it_still_is_one(store: ObjectStorage, quick: None) -> None:
    def work() -> None:
        with store.exclusive("lock", purpose="testing") as still_held:
            still_held()
            client(store).put(LOCK, theirs())
            time.sleep(0.5)
            still_held()
            raise AssertionError("went on without the lock")

    with pytest.raises(StorageBusy, match=r"lost \(another process took it\), and another process may be writing"):
        work()
    client(store).delete(LOCK)


def test_an_error_inside_goes_before_a_lost_lock(store: ObjectStorage, quick: None) -> None:
    def work() -> None:
        with store.exclusive("lock", purpose="testing"):
            client(store).put(LOCK, theirs())
            time.sleep(0.3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    client(store).delete(LOCK)


def test_trouble_in_between_does_not_cost_the_lock(make_store: MakeStore, s3: S3Server, quick: None) -> None:
    with faulty_proxy(s3.url, status=0.2, lost=0.2) as proxy:
        store = make_store(url=proxy.url)
        for _ in range(5):
            with store.exclusive("lock", purpose="testing"):
                time.sleep(0.2)
        assert proxy.made["lost"] > 0
    take(make_store())


def test_the_lock_of_a_killed_process_of_this_machine_ends_at_once(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    store = open_storage(f"s3://data/{place}")
    with held_open(python(HOLD, pickled(store), "lock")) as holder:
        with pytest.raises(StorageBusy, match=f"process {holder.pid}"), store.exclusive("lock", purpose="testing"):
            pytest.fail("two hold one lock")
        holder.kill()
        holder.wait(30)
        began = time.monotonic()
        with store.exclusive("lock", purpose="testing"):
            assert time.monotonic() - began < 5

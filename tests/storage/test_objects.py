"""An S3 bucket keeps the storage contract, and what only an object store can get wrong."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
from pathlib import Path

import pytest

from equipment.processes import pickled, python, run
from equipment.proxy import faulty_proxy
from equipment.servers import S3Server
from penstock.errors import AccessDenied, ConfigError, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage import ObjectStorage, Storage, open_storage
from penstock.storage.connection import Timeouts
from penstock.storage.retry import Budgets, RetryBudget
from penstock.storage.upload import PART_BYTES, part_bytes
from storage.conftest import MakeStore
from storage.suite import READS, WRITES, StorageSuite, keys

EVERYTHING = {**READS, **WRITES, "list": lambda storage, _: list(storage.list())}


class TestObjectStorage(StorageSuite):
    leftovers = 0
    races = 2
    unusable = ("back\\slash",)

    @pytest.fixture
    def storage(self, s3: S3Server, place: str, way: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        return open_storage(f"s3://suite/{place}")


# Large objects


def test_a_large_object_goes_up_in_parts_and_comes_back_the_same(make_store: MakeStore, way: str) -> None:
    store = make_store()
    data = random.Random(1).randbytes(3 * PART_BYTES + 17)
    store.put("put", data)
    with store.writer("written") as writer:
        for start in range(0, len(data), 1_000_003):
            writer.write(data[start : start + 1_000_003])
    for key in ("put", "written"):
        assert str(store.head(key).version).endswith('-4"'), "four parts"
        assert store.get(key) == data
        with store.reader(key) as file:
            assert file.read() == data
    assert str(make_store().put_if_absent("at once", data[: PART_BYTES + 1]).version).count("-") == 0


@pytest.mark.parametrize("size_bytes", [0, 1, PART_BYTES, 100 << 30, 5 << 40])
def test_no_upload_has_too_many_parts(size_bytes: int) -> None:
    assert part_bytes(size_bytes) >= PART_BYTES
    assert -(-size_bytes // part_bytes(size_bytes)) <= 10_000


def test_a_part_that_is_refused_is_told_and_leaves_nothing(make_store: MakeStore) -> None:
    with pytest.raises(AccessDenied, match="big"):
        make_store(key="reader").put("big", bytes(PART_BYTES + 1))
    assert keys(make_store()) == []


# Who may do what


def test_a_key_to_read_cannot_write(make_store: MakeStore) -> None:
    make_store().put("object", b"data")
    reader = make_store(key="reader")
    assert reader.get("object") == b"data"
    assert keys(reader) == ["object"]
    for write in (
        lambda: reader.put("object", b"x"),
        lambda: reader.put_if_absent("new", b"x"),
        lambda: reader.delete("object"),
        lambda: reader.exclusive("lock", purpose="testing").__enter__(),
    ):
        with pytest.raises(AccessDenied, match="403"):
            write()
    assert make_store().get("object") == b"data"
    assert keys(make_store()) == ["object"]


def test_a_key_to_write_cannot_read_other_buckets(make_store: MakeStore) -> None:
    make_store(bucket="elsewhere").put("object", b"theirs")
    make_store().put("object", b"ours")
    writer = make_store(key="writer")
    writer.put("object", b"mine")
    assert writer.get("object") == b"mine"
    assert make_store(bucket="elsewhere", key="stranger").get("object") == b"theirs"
    stranger = make_store(bucket="elsewhere", key="writer")
    for read in (lambda: stranger.get("object"), lambda: stranger.head("object"), lambda: list(stranger.list())):
        with pytest.raises(AccessDenied, match="403"):
            read()


@pytest.mark.parametrize("operation", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_a_wrong_secret_is_refused_after_one_try(make_store: MakeStore, s3: S3Server, operation: object) -> None:
    assert callable(operation)
    with faulty_proxy(s3.url) as proxy:
        store = make_store(secret="wrong", url=proxy.url)

        def attempt() -> None:
            with store.writer("object") as writer:
                writer.write(b"x")

        with pytest.raises(AccessDenied, match="refused") as caught:
            attempt() if operation is WRITES["writer"] else operation(store, "object")
        assert len(proxy.requests) == 1
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_what_is_wrong_with_a_credential_is_told(make_store: MakeStore) -> None:
    make_store().put("object", b"x")
    with pytest.raises(AccessDenied, match=r"403 SignatureDoesNotMatch.*check the access key and its secret"):
        make_store(secret="wrong").get("object")
    with pytest.raises(AccessDenied, match="403 InvalidAccessKeyId"):
        make_store(key="nobody").get("object")
    with pytest.raises(AccessDenied, match=r"403 AccessDenied.*what they may do in this bucket"):
        make_store(key="stranger").get("object")


def test_half_a_credential_is_refused(s3: S3Server) -> None:
    store = open_storage("s3://data", {"endpoint": s3.url, "access_key_id": "tester"})
    with pytest.raises(ConfigError, match="go together"):
        store.get("object")


def test_a_bucket_that_is_not_there_is_told(make_store: MakeStore) -> None:
    with pytest.raises(StorageError, match=r"no such bucket.*check its name") as caught:
        make_store(bucket="no-such-bucket").get("object")
    assert type(caught.value) is StorageError
    with pytest.raises(StorageError, match="no such bucket"):
        list(make_store(bucket="no-such-bucket").list())


# Options and the environment


def test_what_is_given_is_not_mixed_with_the_environment(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    store = make_store()
    store.put("object", b"x")
    assert store.get("object") == b"x"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_the_endpoint_may_come_from_the_environment(
    s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    store = open_storage(f"s3://data/{place}", {"access_key_id": "tester", "secret_access_key": "tester-secret"})
    monkeypatch.setenv(variable, s3.url)  # after opening: it is looked up when the store is used
    store.put("object", b"x")
    assert store.get("object") == b"x"


def test_no_credentials_at_all_are_told(s3: S3Server) -> None:
    quick = Budgets(data=RetryBudget(attempts=1))
    store = ObjectStorage.from_url(
        "s3://data", {"endpoint": s3.url}, budgets=quick, timeouts=Timeouts(connect_s=0.5, read_s=1, whole_s=2)
    )
    with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID"):
        store.get("object")


def test_an_option_that_is_none_is_told_by_name_alone(s3: S3Server) -> None:
    store = open_storage("s3://data", {"endpoint": s3.url, "no_such_option": "hidden value"})
    with pytest.raises(ConfigError, match="no_such_option") as caught:
        store.get("object")
    assert "hidden value" not in str(caught.value)


def test_a_key_that_object_stores_do_not_know_is_refused(make_store: MakeStore) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        make_store().put("line\nbreak", b"x")


# Time-outs


def test_a_server_that_never_answers_is_given_up(make_store: MakeStore, s3: S3Server) -> None:
    once = RetryBudget(attempts=2, first_wait_s=0.01)
    with faulty_proxy(s3.url, hangs=True) as proxy:
        store = make_store(
            url=proxy.url,
            budgets=Budgets(metadata=once, data=once, writes=once),
            timeouts=Timeouts(connect_s=0.5, read_s=0.1, whole_s=1, write_s=0.1),
        )
        for name, operation in EVERYTHING.items():
            if name in ("writer", "no bytes", "reader", "exclusive"):
                continue
            with pytest.raises(TransientStoreError, match=r"given up after 2 tries.*no answer in time"):
                operation(store, "object")


def test_a_server_that_is_not_there_is_given_up(make_store: MakeStore) -> None:
    with pytest.raises(TransientStoreError, match=r"given up after 12 tries.*cannot be reached .connection refused"):
        make_store(url="http://127.0.0.1:9").get("object")


# Processes

READ = """
import pickle, sys
storage = pickle.loads(bytes.fromhex(sys.argv[1]))
print(storage.get("object").decode())
"""

FORK = """
import os, sys
from penstock.storage import open_storage
storage = open_storage(sys.argv[1])
storage.put("object", b"x")
child = os.fork()
if child == 0:
    try:
        storage.get("object")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(storage.get("object").decode())
"""

LEAVE_REQUESTS_OPEN = """
import sys, threading, time
from penstock.storage import open_storage
storage = open_storage(sys.argv[1])
for number in range(4):
    threading.Thread(target=storage.get, args=("object",), daemon=True).start()
time.sleep(0.5)
print("leaving")
"""


def read_and_tell(store: ObjectStorage, path: str) -> None:
    Path(path).write_bytes(store.get("object"))


def test_a_spawned_process_gets_the_credentials_that_were_given(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    store.put("object", b"data")
    process = multiprocessing.get_context("spawn").Process(target=read_and_tell, args=(store, str(tmp_path / "told")))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "told").read_bytes() == b"data"


def environment(s3: S3Server, url: str | None = None) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url or s3.url,
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
    }


def test_any_process_with_the_environment_can_use_a_pickled_store(s3: S3Server, place: str) -> None:
    store = open_storage(f"s3://data/{place}")
    told = pickled(store)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(s3).items():
            patch.setenv(name, value)
        store.put("object", b"data")
        finished = run(python(READ, told))
    assert finished.output.strip() == "data", finished.output


def test_a_forked_process_is_refused_instead_of_hanging(s3: S3Server, place: str) -> None:
    finished = run(python(FORK, f"s3://data/{place}"), env=environment(s3), timeout_s=30)
    said, after = finished.output.splitlines()
    assert said.startswith("StorageError object stores were used in process")
    assert "spawn" in said
    assert after == "x"


def test_nothing_hangs_at_exit_while_requests_are_open(s3: S3Server, place: str) -> None:
    with faulty_proxy(s3.url, hangs=True) as proxy:
        command = python(LEAVE_REQUESTS_OPEN, f"s3://data/{place}")
        done = subprocess.run(
            command,
            env={**os.environ, **environment(s3, proxy.url)},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert len(proxy.requests) == 4
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


# Plain HTTP


def test_a_web_folder_can_be_read(s3: S3Server) -> None:
    with faulty_proxy(s3.url) as proxy:
        store = open_storage(f"{proxy.url}/data")
        assert store.url == f"{proxy.url}/data"
        with pytest.raises(AccessDenied):  # the server wants a signature; that it was asked is what is seen here
            store.get("folder/object")
        assert proxy.requests[0][:2] == ("GET", "/data/folder/object")


def test_what_is_not_there_is_not_there(make_store: MakeStore) -> None:
    make_store().put("object", b"x")
    with pytest.raises(ObjectNotFound, match=r"s3://data/.*/missing does not exist"):
        make_store().get("missing")

"""What every test has: caches of its own, so that none reads or leaves anything in the user's; and, for those that ask,
one S3 server with a place of its own for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings

from equipment.buckets import KEYS, PATIENT, use_key
from equipment.servers import S3Server, s3_server
from penstock.storage import open_storage

# Of torch's threads those that wait sleep: they would else spin for a while after every small operation, and on a busy
# machine take the time that the others need. Read when torch is loaded, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_numbers = count()

settings.register_profile("penstock", deadline=None)  # a machine with much else to do is slow, and nothing is wrong
settings.load_profile("penstock")


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(folder / "penstock"))
        patch.setenv("HF_HOME", str(folder / "hub"))
        for name in [name for name in os.environ if name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "server", KEYS) as server:
        yield server


@pytest.fixture
def place() -> str:
    """A prefix in a bucket that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def bucket(s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a place on the S3 server that no other test uses, with the environment to get there."""
    use_key(monkeypatch, "tester", s3.url)
    storage = open_storage(f"s3://data/{place}")
    storage.put("first", b"")  # which makes the bucket, where it is the first
    storage.delete("first")
    return storage.url


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble is waited out in milliseconds instead of seconds, in this process."""
    monkeypatch.setattr("penstock.storage.objects.Budgets", lambda: PATIENT)

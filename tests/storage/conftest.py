"""One S3 server for all storage tests, with a place of its own for each that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from equipment.servers import S3Server, s3_server
from penstock.storage import ObjectStorage
from penstock.storage.connection import Timeouts
from penstock.storage.retry import Budgets, RetryBudget

KEYS = {
    "reader": ["Read:data", "List:data"],
    "writer": ["Read:data", "List:data", "Write:data"],
    "stranger": ["Read:elsewhere", "List:elsewhere"],
}
QUICK = RetryBudget(attempts=12, deadline_s=60.0, first_wait_s=0.01, longest_wait_s=0.05)
PATIENT = Budgets(metadata=QUICK, data=QUICK, writes=QUICK)

_numbers = count()

MakeStore = Callable[..., ObjectStorage]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "server", KEYS) as server:
        yield server


@pytest.fixture
def place() -> str:
    """A prefix in a bucket that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def make_store(s3: S3Server, place: str) -> MakeStore:
    """A store on the server at a place of this test's own, with another bucket, key, secret or endpoint as told."""

    def make(
        bucket: str = "data",
        key: str = "tester",
        secret: str | None = None,
        url: str | None = None,
        prefix: str | None = None,
        budgets: Budgets = PATIENT,
        timeouts: Timeouts | None = None,
        **options: Any,
    ) -> ObjectStorage:
        given = {
            "endpoint": url or s3.url,
            "access_key_id": key,
            "secret_access_key": f"{key}-secret" if secret is None else secret,
            **options,
        }
        below = place if prefix is None else prefix
        return ObjectStorage.from_url(f"s3://{bucket}/{below}", given, budgets=budgets, timeouts=timeouts)

    return make

"""Stores on the tests' S3 server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from equipment.buckets import PATIENT
from equipment.servers import S3Server
from penstock.storage import ObjectStorage
from penstock.storage.connection import Timeouts
from penstock.storage.retry import Budgets

MakeStore = Callable[..., ObjectStorage]


@pytest.fixture(params=["from the socket", "through obstore"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How objects of plain HTTP are read in this process: both ways keep the same contract."""
    if request.param == "through obstore":
        monkeypatch.setattr("penstock.storage.client.speaks_plainly", lambda _address: False)
    return request.param


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

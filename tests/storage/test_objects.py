"""An S3 bucket keeps the storage contract."""

from __future__ import annotations

import pytest

from equipment.servers import S3Server
from penstock.storage import Storage, open_storage
from storage.suite import StorageSuite


class TestObjectStorage(StorageSuite):
    leftovers = 0
    unusable = ("back\\slash",)

    @pytest.fixture
    def storage(self, s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        return open_storage(f"s3://suite/{place}")

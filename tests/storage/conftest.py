"""One S3 server for all storage tests, with a bucket for each that asks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from equipment.servers import S3Server, s3_server

_numbers = count()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "server") as server:
        yield server


@pytest.fixture
def place() -> str:
    """A place in a bucket that no other test uses."""
    return f"test-{next(_numbers)}"

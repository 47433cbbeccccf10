"""One S3 server with per-key permissions, and one nursery, for all tests of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from equipment.servers import S3Server, s3_server
from exchange.stage import Stage, make_buckets, server_keys
from exchange.workers import Nursery, nursery


@pytest.fixture(scope="session")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("exchange") / "server", server_keys()) as server:
        make_buckets(server.url)
        yield server


@pytest.fixture(scope="session")
def exchange_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def stage(buckets: S3Server, exchange_nursery: Nursery, tmp_path: Path) -> Callable[..., Stage]:
    """A run by its name; each name once in all tests."""

    def make(run: str, **more: object) -> Stage:
        exchange_nursery.folder = tmp_path
        return Stage(buckets.url, run, tmp_path, exchange_nursery, **more)  # pyright: ignore[reportArgumentType]

    return make

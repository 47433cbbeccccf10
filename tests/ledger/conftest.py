"""One PostgreSQL for all tests of a session; and failed assertions of the shared suite tell their values."""

from collections.abc import Iterator

import psycopg
import pytest

from equipment.servers import postgres_server

_SUITE = (
    "choosing",
    "claiming",
    "commits",
    "concurrency",
    "epochs",
    "fencing",
    "identity",
    "progress",
    "restoring",
    "steps",
)
pytest.register_assert_rewrite(*(f"ledger.{name}" for name in (*_SUITE, "model")))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server that forgets on power loss, which no test here causes, and is the faster for it."""
    with postgres_server() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")
        yield url

"""The servers that tests may ask for start from their wheels and answer."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import psycopg
import pytest

from equipment.servers import postgres_server, s3_server


def test_the_s3_server_answers_and_refuses_strangers(tmp_path: Path) -> None:
    with s3_server(tmp_path / "s3") as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.url}/bucket/key", timeout=10)
        assert refused.value.code == 403


def test_postgresql_answers() -> None:
    with postgres_server() as url, psycopg.connect(url) as connection:
        assert connection.execute("SELECT 6 * 7").fetchone() == (42,)

"""A training whose ledger is in PostgreSQL: the same run, and no password anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from equipment.hooks import Recorder
from equipment.servers import postgres_server
from equipment.training import assert_learned_exactly, counting_config, make_store
from penstock.errors import ConfigError
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as url:
        yield re.sub(r"//[^@]*@", "//postgres:s3cret@", url)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_with_its_ledger_in_postgresql_is_resumed_without_naming_it_again(
    tmp_path: Path, server: str, workers: int
) -> None:
    store, run_dir = make_store(tmp_path), tmp_path / "run"
    parallel = {"parallel_independent": True, "workers": workers} if workers > 1 else {}
    config = counting_config(store, run_dir, ledger=f"{server}&run=train_{uuid4().hex}", **parallel)
    stop = StopRequest()
    run_training(config, [Recorder().when("step", 5, lambda _: stop.set())], stop=stop)
    assert run_training(counting_config(store, run_dir, **parallel)).reason == "epoch"
    assert_learned_exactly(run_dir)
    assert not (run_dir / "ledger.sqlite").exists()
    assert "s3cret" not in repr(config)
    for file in run_dir.rglob("*"):
        assert not file.is_file() or b"s3cret" not in file.read_bytes()


def test_a_run_of_another_folder_is_not_taken_over(tmp_path: Path, server: str) -> None:
    store, url = make_store(tmp_path), f"{server}&run=taken_{uuid4().hex}"
    run_training(counting_config(store, tmp_path / "one", ledger=url, steps=2))
    with pytest.raises(ConfigError, match=r"has a ledger .* and no config\.toml") as refused:
        run_training(counting_config(store, tmp_path / "two", ledger=url, steps=2))
    assert "s3cret" not in str(refused.value)

"""Crowds and deaths: every chunk of every epoch is trained once, on both stores; at full size in the soak tests."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from equipment.servers import KillablePostgres, killable_postgres
from ledger.stage import TESTS, claim, whole
from ledger.stress import open_at, run_stress
from penstock.ledger import EpochDone
from penstock.types import ChunkRef


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "ledger.sqlite")
    return f"{request.getfixturevalue('postgres')}&run=stress_{uuid4().hex}"


def test_workers_killed_at_random_train_every_chunk_once(url: str, tmp_path: Path) -> None:
    (tmp_path / "learned").mkdir()
    assert run_stress(url, tmp_path / "learned", chunks=1_500, epochs=2, processes=3, threads=2, kills=4, timeout_s=120)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_sixteen_processes_of_four_threads_train_ten_thousand_chunks_three_times(url: str, tmp_path: Path) -> None:
    (tmp_path / "learned").mkdir()
    killed = run_stress(
        url, tmp_path / "learned", chunks=10_000, epochs=3, processes=16, threads=4, kills=60, timeout_s=3_000
    )
    assert killed >= 10


# -- the server dies ---------------------------------------------------------------------------------------------------


def _survive(folder: Path, *, chunks: int, kills: int, workers: int) -> None:
    """Workers go on through the deaths of their server; each notes what was acknowledged, at once."""
    with killable_postgres() as server:
        url = f"{server.url}&run=survivor"
        open_at(url, chunks).close()
        command = [sys.executable, "-c", NOTE_ALL, url, str(chunks)]
        notes = [(folder / f"notes {index}").open("wb") for index in range(workers)]
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        running = [subprocess.Popen(command, stdout=file, env=env) for file in notes]
        deaths = threading.Thread(target=_kill_again_and_again, args=(server, kills))
        deaths.start()
        deaths.join()
        assert [worker.wait(120) for worker in running] == [0] * workers
        for file in notes:
            file.close()
        lines = [
            line.split() for index in range(workers) for line in (folder / f"notes {index}").read_text().splitlines()
        ]
        claims = [tuple(map(int, line[1:])) for line in lines if line[0] == "claimed"]
        completed = [tuple(map(int, line[1:])) for line in lines if line[0] == "completed"]
        assert len(set(claims)) == len(claims), "a chunk was handed out twice"
        ledger = open_at(url, chunks)
        assert ledger.epoch_done()
        spans = {(span.ref.block_id, span.ref.chunk_id) for span in ledger.spans(0)}
        assert set(completed) <= spans
        assert len(completed) == len(spans) == chunks


NOTE_ALL = """
import sys, time
from ledger.stage import join, whole
from ledger.stress import open_at
from penstock.ledger import EpochDone
ledger = open_at(sys.argv[1], int(sys.argv[2]))
ledger._session_timeout_s = 600  # nobody dies here but the server
session = join(ledger)
commits = 0
while not isinstance(claimed := ledger.claim(session, 3), EpochDone):
    if not isinstance(claimed, list):
        time.sleep(0.1)
        continue
    for lease in claimed:
        print("claimed", lease.ref.block_id, lease.ref.chunk_id, flush=True)
        ledger.complete(lease, whole(lease))
        print("completed", lease.ref.block_id, lease.ref.chunk_id, flush=True)
    commits += 1
    ledger.commit(f"{session.session_id} {commits}", "digest", [session.session_id])
"""


def _kill_again_and_again(server: KillablePostgres, kills: int) -> None:
    for _ in range(kills):
        time.sleep(random.uniform(0.5, 1.5))
        server.kill()
        time.sleep(random.uniform(0.0, 0.5))
        server.start()


def test_nothing_acknowledged_is_lost_when_postgresql_is_killed_under_load(tmp_path: Path) -> None:
    _survive(tmp_path, chunks=600, kills=2, workers=3)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_nothing_acknowledged_is_lost_when_postgresql_is_killed_ten_times(tmp_path: Path) -> None:
    _survive(tmp_path, chunks=6_000, kills=10, workers=8)


# -- clocks ------------------------------------------------------------------------------------------------------------


@contextmanager
def _shifted(seconds: float) -> Iterator[dict[str, str]]:
    """An environment in which Python's clocks are so many seconds off, as on another machine."""
    yield {"PYTHONPATH": str(TESTS), "CLOCK_SHIFT_S": str(seconds)}


CLAIM_WITH_ANOTHER_CLOCK = """
import os, sys, time
shift = float(os.environ["CLOCK_SHIFT_S"])
for name in ("time", "monotonic"):
    real = getattr(time, name)
    setattr(time, name, lambda real=real: real() + shift)
from ledger.stage import join
from ledger.stress import open_at
ledger = open_at(sys.argv[1], 2)
session = join(ledger, "elsewhere")
print(ledger.claim(session, 2))
print(ledger.heartbeat(session) - ledger.status().last_commit.committed_at)
"""


@pytest.mark.parametrize("shift_s", [600, -600])
def test_a_machine_whose_clock_is_ten_minutes_off_steals_nothing(postgres: str, shift_s: float) -> None:
    url = f"{postgres}&run=clocks_{uuid4().hex}"
    ledger = open_at(url, 2)
    ledger.commit("start", "digest", [])
    here = ledger.join("here", generation=0)
    leases = claim(ledger, here, 2)
    with _shifted(shift_s) as env:
        command = [sys.executable, "-c", CLAIM_WITH_ANOTHER_CLOCK, url]
        told = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=True
        )
    answer, ahead = told.stdout.splitlines()
    assert answer.startswith("Wait("), told.stdout
    assert 0 < float(ahead) < 60  # told on the server's clock
    ledger.heartbeat(here)
    for lease in leases:
        ledger.complete(lease, whole(lease))
    ledger.commit("end", "digest", [here.session_id])
    assert isinstance(ledger.claim(here), EpochDone)
    assert [lease.ref for lease in leases] == [ChunkRef(0, 0), ChunkRef(0, 1)]

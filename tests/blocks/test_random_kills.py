"""An ingest killed at random moments, twenty times over, ends byte for byte like one never killed."""

from __future__ import annotations

import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from blocks.data import damages, leftovers
from equipment.hub import hub_server
from equipment.trees import tree
from sources.making import PACKERS, jsonl_of, parquet_of

KILLS = 20
STAGES = 5
"""How many different numbers of finished blocks the kills have to leave, so that they hit all along the way."""
MOST_KILLS = 100
ROWS = [{"text": f"sample {number} " + "x" * (number % 900), "id": number} for number in range(10_000)]
BLOCK_SIZE = 250

# A process that has imported everything forks one for each ingest, so that a kill costs no start of an interpreter.
NURSERY = """
import os, sys, traceback
import orjson
import datasets, penstock.sources.hub, pyarrow.parquet
from penstock.blocks import ingest
print("ready", flush=True)
for line in sys.stdin:
    source, dest, block_size = orjson.loads(line)
    child = os.fork()
    if child == 0:
        try:
            ingest(source, dest, block_size)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@dataclass
class Nursery:
    process: subprocess.Popen[bytes]

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def run(self, source: str, dest: Path, kill_after_s: float | None = None) -> tuple[bool, float]:
        """Ingest, and kill it after so long; returns whether it was killed, and how long it ran."""
        assert self.process.stdin is not None
        began_at = time.monotonic()
        self.process.stdin.write(orjson.dumps([source, str(dest), BLOCK_SIZE]) + b"\n")
        self.process.stdin.flush()
        child = int(self.line())
        if kill_after_s is not None:
            time.sleep(max(0.0, began_at + kill_after_s - time.monotonic()))
            with suppress(ProcessLookupError):  # it was through already
                os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(int(self.line()))
        assert status in (0, -signal.SIGKILL), f"the ingest failed with {status}"
        assert status == 0 or kill_after_s is not None
        return status != 0, time.monotonic() - began_at


@dataclass
class Case:
    nursery: Nursery
    files: Path
    """Where the source's file goes."""
    publish: Callable[[], str]
    """Make a data set of that folder; returns how to name it."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("kills")
    files = folder / "repository"
    with hub_server() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "USE_TORCH": "0"}
        process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

        tiny = folder / "tiny"
        tiny.mkdir()
        (tiny / "rows.jsonl").write_bytes(jsonl_of(ROWS[:1]))
        hub.add("org/tiny", tiny)

        def publish() -> str:
            hub.add("org/name", files)
            return "hf://org/name"

        yield Case(Nursery(process), files, publish)
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def finished_blocks(dest: Path) -> int:
    if (dest / "block_manifest.json").exists():
        return len(ROWS) // BLOCK_SIZE
    return len(list((dest / ".ingest").glob("block_*.json")))


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    return b"text,id\n" + b"".join(b'"%s",%d\n' % (row["text"].encode(), row["id"]) for row in rows)


FORMATS: dict[str, Callable[[], bytes]] = {
    "rows.jsonl": lambda: jsonl_of(ROWS),
    "rows.csv": lambda: csv_of(ROWS),
    "rows.parquet": lambda: parquet_of(pa.Table.from_pylist(ROWS), 700),
    "rows.jsonl.gz": lambda: PACKERS[".gz"](jsonl_of(ROWS)),
    "hf://": lambda: jsonl_of(ROWS),
}


@pytest.mark.parametrize("name", FORMATS)
def test_killed_at_any_moment_it_ends_like_one_never_killed(tmp_path: Path, case: Case, name: str) -> None:
    shutil.rmtree(case.files, ignore_errors=True)
    case.files.mkdir()
    path = case.files / (name if name != "hf://" else "rows.jsonl")
    path.write_bytes(FORMATS[name]())
    source = case.publish() if name == "hf://" else str(path)

    _, whole_s = case.nursery.run(source, tmp_path / "whole")
    if name == "hf://":
        _, start_s = case.nursery.run("hf://org/tiny", tmp_path / "tiny")  # finished, it would not even ask the Hub
    else:
        _, start_s = case.nursery.run(source, tmp_path / "whole")  # which finds everything done
    expected = tree(tmp_path / "whole")
    # Moments up to one that lets twenty runs, on the average, come to the end of the work together.
    share_s = max(0.001, whole_s - start_s) / KILLS
    first_latest_s = latest_s = start_s + share_s + math.sqrt(share_s * share_s + 2 * start_s * share_s)

    seed = secrets.randbits(32)
    chance = random.Random(seed)
    dest = tmp_path / "0"
    left: list[int] = []
    while len(left) < KILLS or len(set(left)) < STAGES:
        assert len(left) < MOST_KILLS, f"seed {seed}: the kills hit at too few stages: {left}"
        killed, _ = case.nursery.run(source, dest, chance.uniform(0, latest_s))
        if killed:
            left.append(finished_blocks(dest))
            if left[-1:] == left[-2:-1]:  # reading up to the first new block takes longer than thought
                latest_s *= 1.1
            continue
        assert tree(dest) == expected, f"seed {seed}: differs after kills that left {left} blocks"
        dest, latest_s = tmp_path / str(len(left)), first_latest_s  # this one is through: begin another
    case.nursery.run(source, dest)
    assert tree(dest) == expected, f"seed {seed}: differs after kills that left {left} blocks"
    assert damages(dest) == {}
    assert leftovers(dest) == []

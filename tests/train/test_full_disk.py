"""A full disk, wherever it is met: a sentence, a try in vain, and once there is space the run goes on; nothing is lost.

``disk`` is a small file system that is filled up, where the system lets us mount one; ``limit`` is a limit on the size
of files, which anybody may set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from equipment.forks import start_process
from equipment.prepared import WaitingWorkers, workers_started_by
from equipment.ranks import PATIENCE_S
from equipment.scarcity import CANNOT_MOUNT, Disk, Limit
from equipment.training import assert_learned_exactly, counting_config, make_store
from penstock import faults
from penstock.errors import PenstockError
from penstock.feed.token_store import TokenChunk, TokenStore
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.events import Event, Events, MetricsFile
from penstock.train.run import run_training

FULL = r"no space left|No space left|File too large|disk I/O error"


class Once:
    """Does something at the nth call, and never again."""

    def __init__(self, act: Callable[[], None], nth: int = 1) -> None:
        self._act = act
        self._left = nth

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


class FaultPoint:
    """Stands where fault points are told."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def reach(self, point: str, subject: str) -> None:
        if point == self._name:
            self._act()


def run_out_of_space(place: str, scarce: Disk | Limit) -> None:
    """Have space run out at a place, behind the first commit that has learned something."""
    if place == "metrics":
        exhaust, write = Once(scarce.exhaust, 20), MetricsFile.on_event

        def on_event(self: MetricsFile, event: Event) -> None:
            exhaust()
            write(self, {**event, "padding": "x" * 5000})  # longer than what is left of the file's last page

        MetricsFile.on_event = on_event
    elif place == "token cache":
        put_all = TokenStore.put_all

        def put_in_vain(self: TokenStore, chunks: Iterable[tuple[int, TokenChunk]]) -> None:
            scarce.exhaust()
            try:
                put_all(self, chunks)
            finally:
                scarce.relieve()

        TokenStore.put_all = put_in_vain
    elif place == "anywhere":
        exhaust, forward = Once(scarce.exhaust, 20), Events.forward

        def forward_and_fill(self: Events, event: Event) -> None:
            exhaust()
            forward(self, event)

        Events.forward = forward_and_fill
    else:
        point = {"checkpoint": "train.before_checkpoint", "ledger": "train.before_commit"}[place]
        faults._armed = FaultPoint(point, Once(scarce.exhaust, 3))  # pyright: ignore


def train_with_too_little_space(how: str, place: str, config: TrainingConfig, answer: Path) -> None:
    """Train until space runs out, once more in vain, and to the end once there is some. In a process of its own."""
    run_dir = Path(config.run_dir)
    scarce = Disk([run_dir, Path(config.dataset_file, "tokens")]) if how == "disk" else Limit()
    workers = WaitingWorkers(3 * config.workers if config.workers > 1 else 0)  # they see the same file system
    run_out_of_space(place, scarce)
    told: list[str] = []
    committed: list[int] = []
    with workers_started_by(workers.start):
        for _ in range(2):
            try:
                told.append(run_training(config).reason)
            except PenstockError as error:
                told.append(str(error))
            last = RunFolder(run_dir).ledger.last_commit()
            committed.append(last.total_steps if last else 0)
        scarce.relieve()
        told.append(run_training(config).reason)
    assert_learned_exactly(run_dir)
    left = [path.name for path in run_dir.rglob("*") if path.name.endswith((".penstock-tmp", ".penstock-lock"))]
    answer.write_bytes(orjson.dumps({"told": told, "committed": committed, "left": left}))


def answer_of(how: str, place: str, tmp_path: Path, **changes: object) -> dict[str, Any]:
    config = counting_config(make_store(tmp_path), tmp_path / "run", **changes)
    process = start_process(train_with_too_little_space, how, place, config, tmp_path / "answer")
    process.join(PATIENCE_S)
    process.kill()
    process.join()
    if process.exitcode == CANNOT_MOUNT:
        pytest.skip("no right to mount a file system; the limit on files is tried all the same")
    assert process.exitcode == 0
    return orjson.loads((tmp_path / "answer").read_bytes())


@pytest.mark.parametrize("how", ["disk", "limit"])
@pytest.mark.parametrize("place", ["checkpoint", "metrics", "ledger"])
def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, how: str, place: str) -> None:
    found = answer_of(how, place, tmp_path)
    first, second, last = found["told"]
    assert {"checkpoint": "model.safetensors", "metrics": "metrics.jsonl", "ledger": "ledger.sqlite"}[place] in first
    for told in (first, second):
        assert any(words in told for words in FULL.split("|")), told
        assert "run the same command again" in told or "free space" in told, told
    assert found["committed"][0] == found["committed"][1] > 0
    assert last == "epoch"
    assert not found["left"]


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_token_cache_that_cannot_grow_holds_up_nothing(tmp_path: Path, how: str) -> None:
    assert answer_of(how, "token cache", tmp_path, plan="strided")["told"] == ["epoch"] * 3


@pytest.mark.parametrize("mode", ["parallel_independent", "ddp"])
def test_a_disk_that_fills_up_under_several_processes_loses_nothing(tmp_path: Path, mode: str) -> None:
    found = answer_of("disk", "anywhere", tmp_path, **{mode: True}, workers=2)
    for told in found["told"][:2]:
        assert any(words in told for words in FULL.split("|")), told
    assert found["committed"][0] == found["committed"][1]
    assert found["told"][2] == "epoch"
    assert not found["left"]

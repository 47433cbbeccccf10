"""SIGKILL inside every operation: it is wholly done or wholly not, and the ledger goes on."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from equipment.faults import run_killed_at
from equipment.processes import run
from ledger.acts import ACTS, Scene, act, command, create, fill, set_scene, train
from ledger.clocked import SqliteStage
from ledger.stage import BLOCKS, CHUNK_SIZE, TESTS, audit, join, learn_all
from penstock.ledger import Ledger

ENV = {"PYTHONPATH": str(TESTS)}
POINTS = ("ledger.before_transaction", "ledger.after_transaction")
READS = {"open", "close", "check_blocks", "last_commit", "pending", "epoch_done", "spans", "commits", "status"}
READS |= {"exclusions", "loader_spans"}


def rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Everything in a ledger file, table by table."""
    connection = sqlite3.connect(path)
    tables = [
        name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    ]
    found = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    connection.close()
    return found


def moved(scene: Scene, folder: Path) -> Scene:
    """The same scene over a copy of its file."""
    folder.mkdir()
    stage = SqliteStage(folder / "ledger.sqlite")
    stage.clock.now += 60
    shutil.copy(folder.parent / "scene" / "ledger.sqlite", stage.path)
    return Scene(stage.unopened(), scene.session, scene.lease)


def test_every_operation_that_writes_is_killed_here() -> None:
    operations = {name for name, member in vars(Ledger).items() if callable(member) and not name.startswith("_")}
    assert set(ACTS) == operations - READS


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", ACTS)
def test_a_killed_operation_is_wholly_done_or_not_done(tmp_path: Path, name: str, point: str) -> None:
    scene = set_scene(tmp_path / "scene" / "ledger.sqlite", end_of_epoch=name == "advance_epoch")
    undisturbed, killed = moved(scene, tmp_path / "undisturbed"), moved(scene, tmp_path / "killed")
    before = rows(tmp_path / "scene" / "ledger.sqlite")
    act(name, undisturbed)
    undisturbed.ledger.close()
    done = rows(tmp_path / "undisturbed" / "ledger.sqlite")
    assert done != before

    death = run_killed_at(command(act, name, killed), point, name, env=ENV)
    assert (death.fired, death.finished.returncode) == (True, -signal.SIGKILL), death.finished.output

    assert rows(tmp_path / "killed" / "ledger.sqlite") == (before if point == POINTS[0] else done)
    if point == POINTS[0]:
        act(name, killed)
        killed.ledger.close()
        assert rows(tmp_path / "killed" / "ledger.sqlite") == done
    assert_usable(killed.ledger)


@pytest.mark.parametrize("point", POINTS)
def test_a_ledger_whose_creator_was_killed_is_usable(tmp_path: Path, point: str) -> None:
    stage = SqliteStage(tmp_path / "ledger.sqlite")
    death = run_killed_at(command(create, stage.unopened()), point, "create", env=ENV)
    assert (death.fired, death.finished.returncode) == (True, -signal.SIGKILL), death.finished.output
    assert bool(rows(stage.path)) == (point == POINTS[1])
    assert_usable(stage.open())


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_again_and_again_learns_every_sample_once(tmp_path: Path, point: str) -> None:
    stage = SqliteStage(tmp_path / "run" / "ledger.sqlite")
    deaths = 0
    for nth in range(1, 30):
        killed = run_killed_at(command(train, stage.unopened(), tmp_path), point, "*", nth, env=ENV)
        deaths += killed.fired
        if not killed.fired:
            assert killed.finished.returncode == 0, killed.finished.output
            break
    assert deaths > 5
    ledger = stage.open()
    assert ledger.epoch_done()
    assert audit(ledger).holds
    last = ledger.last_commit()
    assert last is not None
    learned = Counter(map(tuple, json.loads((tmp_path / last.checkpoint_id).read_text())))
    assert learned == {
        (block_id, place // CHUNK_SIZE, place % CHUNK_SIZE): 1
        for block_id, size in enumerate(BLOCKS)
        for place in range(size)
    }


def test_a_ledger_that_cannot_grow_says_so_and_loses_nothing(tmp_path: Path) -> None:
    stage = SqliteStage(tmp_path / "ledger.sqlite")
    stage.catalog.sizes = [400]
    ledger = stage.open()
    session = join(ledger)
    finished = run(command(fill, ledger, session, 200_000), env=ENV)
    completed, said = finished.output.splitlines()
    assert said.startswith(f"{stage.path} cannot be used: ")
    assert said.endswith(": check the folder, its permissions and free space")
    assert ledger.status().chunks["trained"] == int(completed) > 0
    learn_all(ledger, session)
    ledger.leave(session)
    session = join(ledger)
    learn_all(ledger, session)
    ledger.commit("a", "digest", [session.session_id])
    assert audit(ledger, 0, (400,)).holds


def assert_usable(ledger: Ledger) -> None:
    """A resumed run gets to the end of its epoch."""
    commit = ledger.last_commit()
    ledger.restore(commit.checkpoint_id if commit else None)
    epoch = ledger.status().epoch
    session = join(ledger, "resumed")
    learn_all(ledger, session)
    ledger.commit("end", "digest", [session.session_id])
    assert ledger.epoch_done()
    assert audit(ledger, epoch).holds
    ledger.close()

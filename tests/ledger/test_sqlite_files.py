"""Files: what is no ledger of ours is refused in a sentence and left as it is; many may create one at once."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from equipment.processes import held_open, pickled, python, run
from ledger.clocked import SqliteStage
from ledger.stage import IDENTITY, TESTS, claim, join, learn_all, seen
from penstock.errors import LedgerError, LedgerMismatch
from penstock.ledger.schema import VERSION


@pytest.fixture
def stage(tmp_path: Path) -> SqliteStage:
    return SqliteStage(tmp_path / "ledger.sqlite")


@pytest.fixture
def written(stage: SqliteStage) -> bytes:
    """The bytes of a ledger with some history, at its place."""
    ledger = stage.open()
    session = join(ledger)
    learn_all(ledger, session)
    ledger.commit("a", "digest", [session.session_id])
    ledger.close()
    return stage.path.read_bytes()


# -- what is no ledger ------------------------------------------------------------------------------------------------


def _text(path: Path) -> None:
    path.write_text("epoch,chunk\n0,0\n")


def _one_byte(path: Path) -> None:
    path.write_bytes(b"S")


def _other_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE run (epoch INTEGER)")
        connection.execute("INSERT INTO run VALUES (7)")
    connection.close()


def _marked_by_another_program(path: Path) -> None:
    _pragma(path, "application_id = 1196444487")  # GeoPackage


def _newer(path: Path) -> None:
    _pragma(path, f"user_version = {VERSION + 1}")


def _older(path: Path) -> None:
    _pragma(path, f"user_version = {VERSION - 1}")


def _only_its_magic(path: Path) -> None:
    os.truncate(path, 16)


def _cut_in_the_first_page(path: Path) -> None:
    os.truncate(path, 1000)


def _cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwritten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(len(data) - 100))


def _pragma(path: Path, setting: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute(f"PRAGMA {setting}")
    connection.close()


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "text": (
        _text,
        "is not a ledger: it is no SQLite file; restore it from a copy, or begin a new run in another folder",
    ),
    "one byte": (_one_byte, "is not a ledger: it is no SQLite file"),
    "another program's database": (_marked_by_another_program, "is a database of another program: move it away"),
    "a newer version's": (
        _newer,
        f"has schema version {VERSION + 1}, expected {VERSION}: .* use that one for this run",
    ),
    "an older version's": (_older, f"has schema version {VERSION - 1}, expected {VERSION}"),
    "only its magic": (_only_its_magic, "is not a ledger: it is no SQLite file"),
    "cut in the first page": (_cut_in_the_first_page, "is damaged"),
    "cut in half": (_cut_in_half, "is damaged"),
    "overwritten": (_overwritten, "is damaged"),
}


@pytest.mark.parametrize("identity", [IDENTITY, None], ids=["to train", "to read"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_no_ledger_of_ours_is_refused_and_left_as_it_is(
    stage: SqliteStage, written: bytes, what: str, identity: object
) -> None:
    make, sentence = REFUSED[what]
    make(stage.path)
    before = stage.path.read_bytes()
    assert before != written
    with pytest.raises(LedgerError, match=sentence):
        _use(stage, reading=identity is None)
    assert stage.path.read_bytes() == before


def test_a_database_that_bears_no_mark_is_refused_and_left_as_it_is(stage: SqliteStage) -> None:
    _other_program(stage.path)
    before = stage.path.read_bytes()
    for reading in (False, True):
        with pytest.raises(LedgerError, match="is a database of another program"):
            _use(stage, reading=reading)
    assert stage.path.read_bytes() == before
    assert list(stage.path.parent.iterdir()) == [stage.path]


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_ledger_that_another_process_has_locked_is_told_and_left_as_it_is(
    stage: SqliteStage, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ledger.sqlite._BUSY_TIMEOUT_S", 0.2)
    with held_open(python(LOCK, str(stage.path))):
        ledger = stage.open()  # reading is free
        assert ledger.status().last_commit is not None
        with pytest.raises(LedgerError, match=r"was locked by another process for 0 s: find that process and end it"):
            ledger.join("worker", generation=0)
        ledger.close()
        assert stage.path.read_bytes() == written
    stage.open().join("worker", generation=0)


def test_a_folder_is_no_ledger(stage: SqliteStage) -> None:
    stage.path.mkdir()
    for reading in (False, True):
        with pytest.raises(LedgerError, match=f"{stage.path} cannot be used: Is a directory"):
            _use(stage, reading=reading)
    assert list(stage.path.iterdir()) == []


def test_a_ledger_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(LedgerError, match=r"cannot be used: (File exists|Not a directory)"):
        SqliteStage(tmp_path / "file" / "ledger.sqlite").open()
    assert (tmp_path / "file").read_text() == "text"


def test_reading_what_does_not_exist_leaves_nothing_behind(stage: SqliteStage) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        stage.open(identity=None)
    assert list(stage.path.parent.iterdir()) == []


def test_a_ledger_whose_creator_was_killed_at_once_is_created(stage: SqliteStage) -> None:
    stage.path.touch()
    with pytest.raises(LedgerError, match="there is no ledger"):
        stage.open(identity=None)
    ledger = stage.open()
    assert len(claim(ledger, join(ledger), 9)) == 5


def test_a_refused_ledger_holds_up_nobody(stage: SqliteStage, written: bytes) -> None:
    refused = stage.unopened(identity=replace(IDENTITY, dataset_id="other"))
    with pytest.raises(LedgerMismatch):
        refused.open()
    stage.open().close()
    assert [path.name for path in stage.path.parent.iterdir()] == ["ledger.sqlite"]  # the last to close cleans up
    assert stage.path.read_bytes() == written


def _use(stage: SqliteStage, *, reading: bool) -> None:
    ledger = stage.open(identity=None if reading else IDENTITY)
    ledger.status()


# -- creating ---------------------------------------------------------------------------------------------------------

OPEN = """
import pickle, sys
from penstock.errors import LedgerMismatch
ledger = pickle.loads(bytes.fromhex(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    ledger.open()
    print(ledger.status().dataset_id)
except LedgerMismatch:
    print("refused")
"""


@pytest.mark.parametrize("attempt", range(3))
def test_many_processes_may_create_a_ledger_at_once(stage: SqliteStage, attempt: int) -> None:
    wanted = [IDENTITY, replace(IDENTITY, dataset_id="numbers")] * 3
    told = _at_once([pickled(stage.unopened(identity=identity)) for identity in wanted])
    owner = stage.open(identity=None).status().dataset_id
    assert told == [identity.dataset_id if identity.dataset_id == owner else "refused" for identity in wanted], attempt


def test_many_threads_may_create_a_ledger_at_once(stage: SqliteStage) -> None:
    def open_and_close(_: int) -> str:
        ledger = stage.open()
        dataset_id = ledger.status().dataset_id
        ledger.close()
        return dataset_id

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(open_and_close, range(8))) == [IDENTITY.dataset_id] * 8


def _at_once(ledgers: list[str]) -> list[str]:
    """Open ledgers in processes of their own, all let go at the same moment; returns the last word of each."""
    processes = [
        subprocess.Popen(
            python(OPEN, ledger),
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for ledger in ledgers
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[0].strip() for process in processes]


# -- folders that cannot be written -----------------------------------------------------------------------------------

READ_ONLY = """
import encodings.ascii, os, pickle, sys
from penstock.errors import LedgerError
ledger = pickle.loads(bytes.fromhex(sys.argv[1]))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
ledger.open()
print(ledger.status().samples_committed)
try:
    ledger.restore(None)
except LedgerError as error:
    print(error)
"""


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "in use"])
def test_a_ledger_in_a_folder_that_cannot_be_written_can_be_read(closed: bool) -> None:
    with TemporaryDirectory() as folder:
        stage = SqliteStage(Path(folder, "ledger.sqlite"))
        ledger = stage.open()
        session = join(ledger)
        learn_all(ledger, session)
        ledger.commit("a", "digest", [session.session_id])
        if closed:
            ledger.close()
        Path(folder).chmod(0o555)
        try:
            finished = run(python(READ_ONLY, pickled(stage.unopened())), env={"PYTHONPATH": str(TESTS)})
        finally:
            Path(folder).chmod(0o755)
        told = finished.output.splitlines()
        assert told[0] == "9", finished.output
        assert told[1].startswith(
            f"{stage.path} cannot be used: attempt to write a readonly database: check the folder"
        )
        assert seen(stage.open()) == seen(ledger)


def test_a_ledger_is_refused_where_nothing_can_be_made() -> None:
    with pytest.raises(LedgerError, match="cannot be used"):
        SqliteStage(Path("/proc/no-such-process/ledger.sqlite")).open()

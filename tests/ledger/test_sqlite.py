"""The SQLite ledger keeps the contract, and what only it promises: time by boot, costs, processes that fork."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from equipment.processes import pickled, python, run
from ledger.clocked import ClockedSqlite, SqliteStage
from ledger.stage import CHUNKS, IDENTITY, TESTS, TIMEOUT_S, Catalog, claim, join, learn, whole
from ledger.suite import LedgerSuite
from penstock.errors import ConfigError, LeaseLost
from penstock.ledger import Lease, Ledger, Session, open_ledger
from penstock.ledger.database import Move
from penstock.ledger.sqlite import SqliteTransaction


class TestSqliteLedger(LedgerSuite):
    @pytest.fixture
    def stage(self, tmp_path: Path) -> SqliteStage:
        return SqliteStage(tmp_path / "run" / "ledger.sqlite")

    # -- time ----------------------------------------------------------------------------------------------------------

    def test_after_a_reboot_every_session_from_before_it_is_fenced(self, ledger: Ledger, stage: SqliteStage) -> None:
        before = join(ledger, "before")
        claim(ledger, before, 5)
        stage.clock.boot_id, stage.clock.now = "second boot", 3.0  # long before the deadline of the first boot
        session = join(ledger, "after")
        assert [lease.ref for lease in claim(ledger, session, 5)] == CHUNKS
        with pytest.raises(LeaseLost):
            ledger.heartbeat(before)
        ledger.heartbeat(session)

    def test_fencing_the_silent_finds_those_of_another_boot(self, ledger: Ledger, stage: SqliteStage) -> None:
        before = join(ledger, "before")
        stage.clock.boot_id = "second boot"
        join(ledger, "after")
        assert ledger.fence_silent() == [before.session_id]

    def test_deadlines_are_told_on_the_clock_that_runs_while_the_machine_sleeps(self, tmp_path: Path) -> None:
        ledger = open_ledger(tmp_path / "ledger.sqlite", identity=IDENTITY, catalog=Catalog(), session_timeout_s=7)
        session = join(ledger)
        earliest = time.clock_gettime(time.CLOCK_BOOTTIME) + 7
        deadline = ledger.heartbeat(session)
        assert earliest <= deadline <= time.clock_gettime(time.CLOCK_BOOTTIME) + 7

    # -- costs ---------------------------------------------------------------------------------------------------------

    def test_no_call_costs_more_the_more_chunks_are_committed(self, tmp_path: Path) -> None:
        few, many = (
            _costs_behind(tmp_path / str(chunks), chunks) for chunks in (10, 522)
        )  # so that as much is on record ahead
        assert few == many
        assert set(few) == {*_CALLS, "join", "commit"}
        assert min(few.values()) > 0

    # -- processes -----------------------------------------------------------------------------------------------------

    def test_a_forked_process_uses_a_connection_of_its_own(self, ledger: Ledger, stage: SqliteStage) -> None:
        join(ledger, "parent")
        finished = run(python(FORK, pickled(stage.unopened())), env={"PYTHONPATH": str(TESTS)})
        assert (finished.returncode, finished.output) == (0, "child 1\nparent 2\n")
        assert [worker.worker for worker in ledger.status().workers] == ["parent", "before", "child", "after"]

    def test_opening_it_a_second_time_leaves_the_locks_of_the_first(self, ledger: Ledger, stage: SqliteStage) -> None:
        """Closing any descriptor of a file drops every lock of the process on it; SQLite alone may open it."""
        join(ledger, "first")
        inode = f":{stage.path.stat().st_ino} "
        held = [line for line in Path("/proc/locks").read_text().splitlines() if inode in line + " "]
        assert held, "SQLite holds no lock that could be lost"
        stage.open().status()
        after = [line for line in Path("/proc/locks").read_text().splitlines() if inode in line + " "]
        assert len(after) >= len(held)

    def test_a_ledger_that_another_thread_has_open_is_refused_in_a_forked_process(self, stage: SqliteStage) -> None:
        stage.open()
        finished = run(python(FORK_BESIDE_A_THREAD, pickled(stage.unopened())), env={"PYTHONPATH": str(TESTS)})
        assert finished.returncode == 0, finished.output
        assert "was in use when this process was forked" in finished.output
        assert finished.output.splitlines()[-1] == "parent goes on"


FORK_BESIDE_A_THREAD = """
import os, pickle, sys, threading
from ledger.stage import join
ledger = pickle.loads(bytes.fromhex(sys.argv[1]))
opened, done = threading.Event(), threading.Event()
def work():
    join(ledger, "thread")
    opened.set()
    done.wait(30)
thread = threading.Thread(target=work)
thread.start()
opened.wait(30)
if not os.fork():
    try:
        ledger.status()
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
done.set()
thread.join()
ledger.status()
print("parent goes on")
"""

FORK = """
import os, pickle, sys
from ledger.stage import claim, join
ledger = pickle.loads(bytes.fromhex(sys.argv[1]))
session = join(ledger, "before")
if not os.fork():
    print("child", claim(ledger, join(ledger, "child"))[0].token, flush=True)
    os._exit(0)
os.wait()
join(ledger, "after")
print("parent", claim(ledger, session)[0].token)
"""


class CountingSqlite(ClockedSqlite):
    """Counts the virtual machine's instructions of every transaction and every reading, by operation."""

    counted: ClassVar[Counter[str]] = Counter()

    def change(self, operation: str, body: Callable[[SqliteTransaction], Any], *, durable: bool = False) -> Any:
        with self._counting(operation):
            return super().change(operation, body, durable=durable)

    def read(self, body: Callable[[SqliteTransaction], Any]) -> Any:
        with self._counting("read"):
            return super().read(body)

    def claim_open(self, session_id: int, count: int, request: int) -> list[Any]:
        with self._counting("claim"):
            return super().claim_open(session_id, count, request)

    def move_chunk(self, name: Move, values: Sequence[object]) -> bool:
        with self._counting(name):
            return super().move_chunk(name, values)

    def renew(self, session_id: int, timeout_s: float) -> float | None:
        with self._counting("heartbeat"):
            return super().renew(session_id, timeout_s)

    @contextmanager
    def _counting(self, operation: str) -> Iterator[None]:
        connection = self._connection()

        def count() -> int:
            self.counted[operation] += 1
            return 0

        connection.set_progress_handler(count, 1)
        try:
            yield
        finally:
            connection.set_progress_handler(None, 1)


_CALLS: dict[str, Callable[[Ledger, Session, Lease], object]] = {
    "heartbeat": lambda ledger, session, _: ledger.heartbeat(session),
    "fence_silent": lambda ledger, *_: ledger.fence_silent(),
    "claim": lambda ledger, session, _: ledger.claim(session),
    "claim in a round": lambda ledger, session, _: ledger.claim(session, round_chunks=100),
    "claim in a full round": lambda ledger, session, _: ledger.claim(session, round_chunks=1),
    "complete": lambda ledger, _, lease: ledger.complete(lease, whole(lease)),
    "take_step": lambda ledger, session, _: ledger.take_step(session, 10**6),
    "pending": lambda ledger, *_: ledger.pending(),
    "epoch_done": lambda ledger, *_: ledger.epoch_done(),
    "last_commit": lambda ledger, *_: ledger.last_commit(),
    "advance_epoch": lambda ledger, *_: ledger.advance_epoch(0),
    "leave": lambda ledger, session, _: ledger.leave(session),
}


def _costs_behind(folder: Path, chunks: int) -> dict[str, int]:
    """What each call costs, in instructions, behind so many committed chunks of as many sessions."""
    stage = SqliteStage(folder / "ledger.sqlite")
    stage.catalog.sizes = [10_000]
    ledger = stage.open()
    for index in range(chunks):
        earlier = ledger.join("earlier", generation=0)
        learn(ledger, earlier)
        ledger.commit(str(index), "digest", [earlier.session_id])
        ledger.leave(earlier)
    gone = join(ledger, "gone")
    claim(ledger, gone, 3)
    ledger.leave(gone)
    session = ledger.join("worker", generation=0)
    lease = claim(ledger, session)[0]
    ledger = stage.unopened(database=CountingSqlite(str(stage.path), stage.clock))
    costs: dict[str, int] = {}
    CountingSqlite.counted.clear()
    other = ledger.join("other", generation=0)
    costs["join"] = CountingSqlite.counted.total()
    for name, call in _CALLS.items():
        CountingSqlite.counted.clear()
        call(ledger, other if name == "leave" else session, lease)
        costs[name] = CountingSqlite.counted.total()
    CountingSqlite.counted.clear()
    ledger.commit("last", "digest", [session.session_id])
    costs["commit"] = CountingSqlite.counted.total()
    return costs


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_that_would_fence_everybody_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(ConfigError, match=f"session_timeout_s={timeout} would fence every worker"):
        open_ledger(tmp_path / "ledger.sqlite", identity=IDENTITY, session_timeout_s=timeout)
    assert list(tmp_path.iterdir()) == []


def test_a_url_of_another_store_is_refused_without_telling_its_secrets() -> None:
    with pytest.raises(
        ConfigError, match=r"ledger redis:// is not supported: expected a path or postgresql://host/database\?run=name$"
    ):
        open_ledger("redis://user:secret@host/0", identity=IDENTITY)


def test_a_ledger_is_opened_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "what%20is ?this#.sqlite"
    ledger = open_ledger(path, identity=IDENTITY, catalog=Catalog(), session_timeout_s=TIMEOUT_S)
    claim(ledger, join(ledger))
    assert open_ledger(str(path)).status().chunks["leased"] == 1
    assert path.exists()

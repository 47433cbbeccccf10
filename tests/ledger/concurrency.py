"""Many at once: threads of one process and processes of one machine, each chunk to one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from equipment.processes import pickled, python, run
from ledger.stage import CHUNK_SIZE, TESTS, Stage, audit, claim, join, learn, whole
from penstock.ledger import EpochDone, Lease
from penstock.types import ChunkRef

WORKERS = 4
BLOCKS = (60, 61)
REFS = [ChunkRef(block_id, chunk_id) for block_id, chunks in enumerate((30, 31)) for chunk_id in range(chunks)]

CLAIM_ALL = """
import pickle, sys
from ledger.stage import join, whole
ledger = pickle.loads(bytes.fromhex(sys.argv[1]))
session = join(ledger, sys.argv[2])
print(session.session_id)
while isinstance(claimed := ledger.claim(session, 2), list):
    for lease in claimed:
        ledger.complete(lease, whole(lease))
        print(lease.ref.block_id, lease.ref.chunk_id)
"""


class ConcurrencyBehaviour:
    def test_threads_that_share_a_ledger_claim_each_chunk_once(self, stage: Stage) -> None:
        stage.catalog.sizes = list(BLOCKS)
        ledger = stage.open()

        def claim_all(name: str) -> list[Lease]:
            session = join(ledger, name)
            leases: list[Lease] = []
            while isinstance(claimed := ledger.claim(session, 2), list):
                leases += claimed
            ledger.close()
            return leases

        with ThreadPoolExecutor(WORKERS) as pool:
            leases = [lease for found in pool.map(claim_all, "abcd") for lease in found]
        assert sorted(lease.ref for lease in leases) == REFS
        assert len({lease.token for lease in leases}) == len(REFS)

    def test_processes_claim_each_chunk_once(self, stage: Stage) -> None:
        stage.catalog.sizes = list(BLOCKS)
        ledger = stage.open()
        command = [python(CLAIM_ALL, pickled(ledger), f"worker {index}") for index in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            ended = list(pool.map(lambda line: run(line, env={"PYTHONPATH": str(TESTS)}), command))
        assert [finished.returncode for finished in ended] == [0] * WORKERS, ended
        told = [finished.output.split("\n") for finished in ended]
        refs = [ChunkRef(*map(int, line.split())) for lines in told for line in lines[1:-1]]
        assert sorted(refs) == REFS
        ledger.commit("a", "digest", [int(lines[0]) for lines in told])
        assert audit(ledger, 0, BLOCKS).holds

    def test_workers_that_commit_alone_finish_the_epoch_together(self, stage: Stage) -> None:
        stage.catalog.sizes = list(BLOCKS)
        ledger = stage.open()

        def train(name: str) -> None:
            session = join(ledger, name)
            commits = 0
            while not isinstance(claimed := ledger.claim(session, 3), EpochDone):
                for lease in claimed if isinstance(claimed, list) else []:
                    ledger.complete(lease, whole(lease))
                if isinstance(claimed, list):
                    commits += 1
                    ledger.commit(f"{name} {commits}", "digest", [session.session_id])
            ledger.close()

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(train, "abcd"))
        assert audit(ledger, 0, BLOCKS).holds
        assert [commit.seq for commit in ledger.commits()] == list(range(1, len(ledger.commits()) + 1))

    def test_readers_see_whole_commits_only(self, stage: Stage) -> None:
        stage.catalog.sizes = [200 * CHUNK_SIZE]
        ledger = stage.open()
        session = join(ledger)

        def write() -> None:
            for index in range(40):
                learn(ledger, session, 5)
                ledger.commit(str(index), "digest", [session.session_id])
            ledger.close()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            reader = stage.open()
            finished, committed = False, 0
            while not finished:
                finished = writing.done()
                status = reader.status()
                committed = status.chunks["committed"]
                assert committed % 5 == 0
                assert status.samples_committed == committed * CHUNK_SIZE
                assert status.total_steps == committed
                assert (status.last_commit.total_steps if status.last_commit else 0) == committed
            writing.result()
        assert committed == 200

    def test_two_ledgers_over_one_store_are_one(self, stage: Stage) -> None:
        one, two = stage.open(), stage.open()
        session = join(one)
        lease = claim(one, session)[0]
        two.complete(lease, whole(lease))
        commit = two.commit("a", "digest", [session.session_id])
        assert one.commits() == [commit]

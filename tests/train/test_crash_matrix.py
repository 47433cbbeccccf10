"""Random SIGKILLs of a worker, of its parent and of all, also inside commits; then the weights and the audit are asked.

A few on every test run; `make soak` does PENSTOCK_KILLS (30) a store. A seed that failed goes into PENSTOCK_SOAK_SEED.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from uuid import uuid4

import pytest

from equipment.ranks import PATIENCE_S
from equipment.servers import postgres_server
from equipment.training import assert_learned_exactly, counting_config, start_training, train_in_process, weights
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig

MODES: dict[str, dict[str, object]] = {
    "alone": {"model": "tiny", "merge": "mean"},
    "workers": {"parallel_independent": True, "workers": 2},
    "ranks": {"ddp": True, "workers": 2, "commit_every_s": 0.05, "rank_timeout_s": 20.0},
}
INSIDE_A_COMMIT = (
    "train.before_checkpoint|*",
    "train.before_commit|*",
    "train.after_commit|*",
    "storage.before_fsync|checkpoints/*",
    "storage.after_rename|checkpoints/*",
    "ledger.before_transaction|commit",
    "ledger.after_transaction|commit",
)
Ledgers = Callable[[], str]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def new_ledger(request: pytest.FixtureRequest) -> Iterator[Ledgers]:
    """Names a ledger that no run has used."""
    if request.param == "sqlite":
        yield lambda: ""
        return
    with postgres_server() as url:
        yield lambda: f"{re.sub(r'//[^@]*@', '//postgres@', url)}&run=matrix_{uuid4().hex}"


def children_of(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def told(run_dir: Path, kind: str) -> int:
    if not (run_dir / "config.toml").exists():
        return 0
    return sum(event["event"] == kind for event in RunFolder(run_dir).events())


def kill_once(config: TrainingConfig, whom: str, chance: random.Random, once: Path) -> bool:
    """Start a training and kill some of it somewhere; whether it died of that, and was not through before."""
    fault: dict[str, str] = {}
    if whom == "commit":
        place = f"{chance.choice(INSIDE_A_COMMIT)}|{chance.randint(1, 3)}"
        fault = {"PENSTOCK_FAULT": place, "PENSTOCK_FAULT_ONCE": str(once)}
    run_dir = Path(config.run_dir)
    steps = told(run_dir, "step") + chance.randint(0, 8)
    process = start_training(config, fault, group=True)
    pid, family = process.pid or 0, set[int]()
    deadline = time.monotonic() + PATIENCE_S
    while process.is_alive() and time.monotonic() < deadline:
        family |= {*children_of(pid)}
        if fault and once.exists():
            break
        if not fault and told(run_dir, "step") > steps:
            time.sleep(chance.uniform(0.0, 0.02))
            kill(process, whom, chance)
            break
        time.sleep(0.005)
    # Those that outlive a kill come to their end by themselves, or are sent there: the others were killed, not these.
    process.join(chance.uniform(0.0, 8.0) if whom in ("worker", "commit") else 10)
    died = process.exitcode != 0
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    process.join()
    while any(Path(f"/proc/{child}").exists() for child in family):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)
    return died


def kill(process: BaseProcess, whom: str, chance: random.Random) -> None:
    pid = process.pid or 0
    with suppress(ProcessLookupError):
        if whom == "all":
            os.killpg(pid, signal.SIGKILL)
        elif whom == "worker" and (children := children_of(pid)):
            os.kill(chance.choice(children), signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def survive(store: Path, folder: Path, new_ledger: Ledgers, mode: str, kills: int, seed: int) -> Counter[str]:
    """So many kills over as many runs as it takes, each run resumed to its end and asked."""
    chance = random.Random(seed)
    reference = folder / "reference"
    if mode == "alone":
        assert train_in_process(counting_config(store, reference, **MODES[mode])) == 0
    done: Counter[str] = Counter()
    runs = 0
    while done.total() < kills:
        runs += 1
        config = counting_config(store, folder / f"run-{runs}", ledger=new_ledger(), **MODES[mode])
        for place in range(chance.randint(1, 3)):
            whom = chance.choice(["worker", "parent", "all", "commit"])
            done[whom] += kill_once(config, whom, chance, folder / f"once-{runs}-{place}")
        assert train_in_process(config) == 0, f"{mode}, seed {seed}, run {runs}: the resume did not end well"
        if mode == "alone":
            expected, found = weights(reference), weights(Path(config.run_dir))
            assert all(found[name].equal(expected[name]) for name in expected), f"seed {seed}, run {runs}: other bits"
        else:
            assert_learned_exactly(Path(config.run_dir))
        assert not list(Path(config.run_dir).glob("replicas/*"))
    return done


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_a_few_kills_lose_and_repeat_nothing(store: Path, tmp_path: Path, new_ledger: Ledgers, mode: str) -> None:
    if mode == "ranks" and new_ledger():
        pytest.skip("the soak does this one: it shares all of its code with the others, and takes its time")
    assert survive(store, tmp_path, new_ledger, mode, 3 if mode == "alone" else 1, seed=7).total() >= 1


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_thirty_kills_lose_and_repeat_nothing(store: Path, tmp_path: Path, new_ledger: Ledgers, mode: str) -> None:
    seed = int(os.environ.get("PENSTOCK_SOAK_SEED", random.randrange(10**6)))
    kills = int(os.environ.get("PENSTOCK_KILLS", "30"))
    assert survive(store, tmp_path, new_ledger, mode, kills, seed).total() >= kills

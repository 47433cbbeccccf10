"""Under torchrun: ranks share every global batch; killed and resumed on another number of ranks, nothing is lost."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from equipment.processes import Finished, python, run
from feed.stores import SIZE, make_loader, make_small_store, small_chunks

TRAINING = Path(__file__).parent / "torchrun_training.py"


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


def torchrun(ranks: int, *arguments: object) -> Finished:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {"PYTHONPATH": str(TRAINING.parent.parent), "OMP_NUM_THREADS": "1"}
    return run([*command, str(TRAINING), *map(str, arguments)], env=env, timeout_s=150)


def learned(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, over all ranks and runs, by the last checkpoint."""
    steps: dict[int, list[int]] = defaultdict(list)
    for share in json.loads((folder / "checkpoint.json").read_text())["learned"]:
        for step, sample_ids in share:
            steps[step] += sample_ids
    return steps


@pytest.mark.parametrize("kind", ["texts", "packed"])
def test_killed_on_two_ranks_and_resumed_on_three_nothing_is_lost_or_repeated(tmp_path: Path, kind: str) -> None:
    store = make_small_store(tmp_path)
    killed = torchrun(2, store, tmp_path, kind, 10)
    assert killed.returncode != 0
    assert json.loads((tmp_path / "checkpoint.json").read_text())["state"]["step"] == 8
    resumed = torchrun(3, store, tmp_path, kind)
    assert resumed.returncode == 0, resumed.output
    steps = learned(tmp_path)
    counts = Counter(sample_id for sample_ids in steps.values() for sample_id in sample_ids)
    assert counts == Counter(range(SIZE)), "each sample once"
    alone = make_loader(store, packed=kind == "packed")
    for step, batch in enumerate(alone, 1):
        assert sorted(steps[step]) == sorted(batch["sample_ids"].tolist()), f"the global batch of step {step}"
    assert json.loads((tmp_path / "checkpoint.json").read_text())["state"]["epoch"] == 1


def test_a_loader_that_was_not_told_its_rank_stops_every_rank(tmp_path: Path) -> None:
    store = make_small_store(tmp_path)
    code = f"from penstock import DistributedLoader; DistributedLoader({str(store)!r}, 4)"
    finished = run(python(code), env={"RANK": "1", "WORLD_SIZE": "2"})
    assert finished.returncode != 0
    assert "this process is RANK=1 of WORLD_SIZE=2, and the loader was not told" in finished.output

"""Skip ranges in a training: what is excluded is not learned, by the weights themselves, through stops and crashes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from equipment.hooks import Recorder
from equipment.training import SAMPLES, counting_config, make_store, weights
from penstock.cli.main import app
from penstock.ledger import SkipRange
from penstock.observe.history import what_step_saw, who_trained
from penstock.observe.proof import prove
from penstock.observe.run_folder import RunFolder
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest
from penstock.types import ChunkRef

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def learned(run_dir: Path) -> list[int]:
    return [int(count) for count in weights(run_dir)["model.counts"].tolist()]


def begun(store: Path, run_dir: Path, steps: int, **changes: object) -> None:
    """A run that was stopped after so many steps."""
    stop = StopRequest()
    recorder = Recorder().when("step", steps, lambda _: stop.set())
    run_training(counting_config(store, run_dir, **changes), [recorder], stop=stop)


def cli(*words: str) -> dict:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return orjson.loads(done.stdout)


@pytest.mark.parametrize("workers", [1, 2])
def test_excluded_samples_are_not_learned_and_not_missing(store: Path, tmp_path: Path, workers: int) -> None:
    run_dir = tmp_path / "run"
    begun(store, run_dir, 2)
    before = learned(run_dir)
    cli("skip", str(run_dir), "--samples", "27:33", "--chunk", "2/0", "--block", "1", "--reason", "noise", "--json")
    cli("skip", str(run_dir), "--samples", "57:58", "--reason", "a name in it", "--json")
    parallel = {"parallel_independent": True, "workers": workers} if workers > 1 else {}
    run_training(counting_config(store, run_dir, **parallel))
    skipped = {*range(25, 50), *range(50, 55), 57}
    counts = learned(run_dir)
    assert all(counts[sample] >= before[sample] for sample in range(SAMPLES))
    assert [sample for sample in range(SAMPLES) if counts[sample] != 1] == sorted(skipped)
    audit = prove(RunFolder(run_dir))[0]
    assert audit.holds
    assert (audit.once, audit.excluded, audit.missing) == (SAMPLES - len(skipped), len(skipped), 0)
    told = cli("audit", str(run_dir), "--json")
    assert [entry["reason"] for entry in told["exclusions"]] == ["noise"] * 3 + ["a name in it"]


def test_a_later_epoch_leaves_out_what_an_earlier_one_learned(store: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_training(counting_config(store, run_dir))
    RunFolder(run_dir).ledger.exclude([SkipRange(block_id=0, start=3, stop=7)], "noise")
    stop = StopRequest()
    recorder = Recorder().when("commit", 4, lambda _: stop.set())
    run_training(counting_config(store, run_dir, iterate=True), [recorder], stop=stop)
    assert prove(RunFolder(run_dir))[0].once == SAMPLES
    assert learned(run_dir)[3:7] == [1, 1, 1, 1]
    assert learned(run_dir)[:3] == [2, 2, 2]


def test_the_audit_tells_what_a_step_saw_and_who_trained_a_chunk(store: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begun(store, run_dir, 5)
    run_training(counting_config(store, run_dir))
    folder = RunFolder(run_dir)
    total = folder.ledger.status().total_steps
    seen = [what_step_saw(folder, step) for step in range(1, total + 1)]
    assert all(len(each) == 1 and each[0].checkpoint_id for each in seen)
    ids = {sample for each in seen for first, stop in each[0].samples for sample in range(first, stop)}
    assert ids == set(range(SAMPLES))
    told = cli("audit", str(run_dir), "--step", "1", "--json")["steps"][0]
    assert (told["block_id"], told["chunk_id"], told["worker"]) == (0, 0, "worker-0")
    parts = who_trained(folder, ChunkRef(0, 1))
    assert [parts[0].start, parts[-1].stop] == [0, 5]
    assert cli("audit", str(run_dir), "--chunk", "0/1", "--json")["chunk"][0]["checkpoint_id"]


def test_a_step_that_was_undone_is_told_as_such(store: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_training(counting_config(store, run_dir))
    folder = RunFolder(run_dir)
    first = folder.ledger.commits()[1]
    folder.ledger.restore(first.checkpoint_id)
    assert what_step_saw(folder, first.total_steps)[0].checkpoint_id == first.checkpoint_id
    assert what_step_saw(folder, first.total_steps + 1)[0].checkpoint_id is None


@pytest.mark.parametrize(
    "words", [["--samples", "0:61"], ["--samples", "5:5"], ["--block", "3"], ["--chunk", "0/5"], []]
)
def test_what_the_data_set_does_not_have_cannot_be_skipped(store: Path, tmp_path: Path, words: list[str]) -> None:
    run_dir = tmp_path / "run"
    begun(store, run_dir, 1)
    done = CliRunner().invoke(app, ["skip", str(run_dir), "--reason", "noise", *words])
    assert done.exit_code == 1
    assert RunFolder(run_dir).ledger.exclusions() == []

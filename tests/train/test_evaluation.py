"""Evaluation: what it measures, when it happens, and that it changes nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nnf

from equipment.hooks import Recorder
from equipment.training import counting_config, make_store, weights
from penstock.blocks import BlockManager, ingest
from penstock.errors import ConfigError
from penstock.storage import open_storage
from penstock.train.config import TrainingConfig
from penstock.train.events import Events
from penstock.train.parts import RunParts, embedded_ledger
from penstock.train.run import run_training
from penstock.train.stopping import StopRequest

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def eval_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("eval"), samples=23)


def config(store: Path, run_dir: Path, eval_store: Path, **changes: object) -> TrainingConfig:
    chosen = {"model": "tiny", "merge": "mean", "eval_file": str(eval_store), **changes}
    return counting_config(store, run_dir, **chosen)


def test_it_happens_at_the_first_commit_behind_so_many_steps_and_at_the_end(
    store: Path, tmp_path: Path, eval_store: Path
) -> None:
    recorder = Recorder()
    result = run_training(config(store, tmp_path / "run", eval_store, eval_every=10), [recorder])
    told = recorder.of("eval")
    commits = [event["total_steps"] for event in recorder.of("commit")]
    due = [
        here
        for before, here in zip([0, *commits], commits, strict=False)
        if here // 10 > before // 10 or here == result.total_steps
    ]
    assert [event["total_steps"] for event in told] == due
    assert len(due) > 2
    assert all(event["perplexity"] == pytest.approx(math.exp(event["loss"]), rel=1e-3) for event in told)
    assert told[-1]["loss"] < told[0]["loss"]


def test_it_changes_nothing_about_what_is_learned(store: Path, tmp_path: Path, eval_store: Path) -> None:
    run_training(config(store, tmp_path / "with", eval_store, eval_every=1, steps=9))
    run_training(config(store, tmp_path / "without", eval_store, eval_file="", steps=9))
    expected, found = weights(tmp_path / "without"), weights(tmp_path / "with")
    assert all(found[name].equal(expected[name]) for name in expected)


def test_the_loss_is_the_mean_over_tokens(store: Path, tmp_path: Path, eval_store: Path) -> None:
    recorder = Recorder()
    run_training(config(store, tmp_path / "run", eval_store, steps=2), [recorder])
    storage = open_storage(tmp_path / "run")
    parts = RunParts(storage, embedded_ledger(storage))
    last = parts.ledger.last_commit()
    assert last is not None
    trainer = parts.trainer()
    trainer.load_state(parts.checkpoints.read(last.checkpoint_id, last.digest))
    evaluation = parts.evaluation(Events([], 1), 0)
    assert evaluation is not None
    losses = []
    blocks = BlockManager(eval_store)
    for block_id in range(len(blocks.manifest.blocks)):
        for text in blocks.get_chunk(block_id, 0):
            ids = torch.from_numpy(parts.tokenizer.encode([text]).ids.astype("int64"))
            positions = torch.arange(len(ids))[None]
            with torch.no_grad():
                logits = trainer.model(ids[None], positions, torch.zeros_like(positions))[0]
            losses.append(nnf.cross_entropy(logits[:-1], ids[1:], reduction="none"))
    # Whole documents, where the run cuts them into sequences: alike, and with as many tokens.
    assert recorder.of("eval")[0]["num_tokens"] == sum(len(part) for part in losses)
    assert recorder.of("eval")[0]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=0.02)
    found = evaluation.evaluate(trainer)
    assert found is not None
    assert found.loss == pytest.approx(recorder.of("eval")[0]["loss"], abs=1e-5)
    assert evaluation.evaluate(trainer, lambda: True) is None


def test_a_few_batches_can_be_enough(store: Path, tmp_path: Path, eval_store: Path) -> None:
    recorder = Recorder()
    run_training(config(store, tmp_path / "run", eval_store, steps=2, eval_batches=1), [recorder])
    assert recorder.of("eval")[0]["num_tokens"] <= 2 * 16


def test_several_workers_evaluate_what_they_have_merged(store: Path, tmp_path: Path, eval_store: Path) -> None:
    recorder = Recorder()
    chosen = config(store, tmp_path / "run", eval_store, eval_every=5, parallel_independent=True, workers=2)
    result = run_training(chosen, [recorder])
    told = [event["total_steps"] for event in recorder.of("eval")]
    assert told[-1] == result.total_steps
    assert len(told) >= 2
    assert set(told) <= {event["total_steps"] for event in recorder.of("commit")}


def test_whoever_wants_to_stop_does_not_wait_for_it_and_a_finished_run_is_not_evaluated_again(
    store: Path, tmp_path: Path, eval_store: Path
) -> None:
    stop, stopped = StopRequest(), Recorder()
    stopped.when("step", 3, lambda _: stop.set())
    run_training(config(store, tmp_path / "run", eval_store), [stopped], stop=stop)
    assert not stopped.of("eval")
    finished, again = Recorder(), Recorder()
    run_training(config(store, tmp_path / "run", eval_store), [finished])
    assert len(finished.of("eval")) == 1
    run_training(config(store, tmp_path / "run", eval_store), [again])
    assert not again.of("eval")


def test_what_cannot_be_evaluated_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_every=5 needs something to evaluate on"):
        run_training(counting_config(store, tmp_path / "run", eval_every=5))
    with pytest.raises(ConfigError, match="eval_file means nothing to the counting model"):
        run_training(counting_config(store, tmp_path / "run", eval_file=str(store)))
    (tmp_path / "empty.jsonl").touch()
    ingest(tmp_path / "empty.jsonl", tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty, made from .* holds no samples"):
        run_training(config(store, tmp_path / "run", tmp_path / "empty"))
    assert not (tmp_path / "run").exists()

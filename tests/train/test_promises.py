"""What is promised of a training's data: no chunk twice, a whole epoch, a resume that repeats nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipment.hooks import Recorder
from equipment.training import assert_learned_exactly, counting_config, make_store, weights
from penstock.blocks import BlockManager
from penstock.observe.run_folder import RunFolder
from penstock.train.run import run_training

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("data"), samples=420, block_size=100)


def test_two_workers_train_disjoint_chunks_and_the_epoch_ends_when_all_blocks_are_visited(
    store: Path, tmp_path: Path
) -> None:
    recorder = Recorder()
    config = counting_config(store, tmp_path, parallel_independent=True, workers=2, stop_after_epoch=True, steps=10_000)
    config.commit_every_chunks = 20
    assert run_training(config, [recorder]).reason == "epoch"
    chunks: dict[str, set[tuple[int, int]]] = {"worker-0": set(), "worker-1": set()}
    for event in recorder.of("chunk"):
        chunks[event["worker"]].add((event["block_id"], event["chunk_id"]))
    assert chunks["worker-0"].isdisjoint(chunks["worker-1"])
    assert len(chunks["worker-0"] | chunks["worker-1"]) == len(recorder.of("chunk")) == 84
    assert RunFolder(tmp_path).ledger.status().blocks_seen == BlockManager(str(store)).get_total_blocks()
    assert_learned_exactly(tmp_path)


def test_a_hundred_steps_and_a_hundred_more_are_two_hundred_with_no_chunk_twice(store: Path, tmp_path: Path) -> None:
    assert run_training(counting_config(store, tmp_path, steps=100)).total_steps == 100
    assert run_training(counting_config(store, tmp_path, steps=200)).total_steps == 200
    assert RunFolder(tmp_path).ledger.status().total_steps == 200
    assert weights(tmp_path)["model.counts"].max() == 1
    seen: dict[tuple[int, int], int] = {}
    for span in RunFolder(tmp_path).ledger.spans(0):
        assert span.start == seen.get((span.ref.block_id, span.ref.chunk_id), 0), "it goes on where it was left"
        seen[span.ref.block_id, span.ref.chunk_id] = span.stop

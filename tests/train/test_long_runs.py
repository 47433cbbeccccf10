"""Runs that learn their sequences in chunks of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equipment.hooks import Recorder
from equipment.training import counting_config
from penstock.errors import ConfigError
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig
from penstock.train.long.choosing import advised_chunk_size
from penstock.train.run import run_training
from train.test_exact_chunks import MODELS, REFUSED

pytestmark = pytest.mark.usefixtures("one_thread", "forked_workers")

LONG: dict[str, Any] = {"merge": "mean", "max_seq_len": 48, "steps": 6}


def long_config(store: Path, run_dir: Path, **changes: Any) -> TrainingConfig:
    return counting_config(store, run_dir, **{**LONG, "model": "tiny", **changes})


def trained(config: TrainingConfig) -> tuple[list[float], list[float]]:
    """Losses of the steps, and of evaluations."""
    recorder = Recorder()
    run_training(config, [recorder])
    return [event["loss"] for event in recorder.of("step")], [event["loss"] for event in recorder.of("eval")]


@pytest.mark.parametrize(
    "way", [{}, {"ddp": True, "workers": 2, "plan": "strided"}, {"gradient_accumulation_steps": 2}]
)
def test_a_run_in_chunks_learns_what_it_learns_without(store: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    whole = trained(long_config(store, tmp_path / "whole", eval_file=str(store), eval_batches=3, **way))
    chunks = {"use_chunked_training": True, "chunk_size": 7}
    parted = trained(long_config(store, tmp_path / "parts", eval_file=str(store), eval_batches=3, **way, **chunks))
    assert parted[0] == pytest.approx(whole[0], rel=1e-4)
    assert parted[1] == pytest.approx(whole[1], rel=1e-4)
    assert parted[1]


def test_a_model_of_transformers_learns_in_chunks_from_its_config(store: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODELS["qwen2"], "vocab_size": 300}))
    whole = trained(long_config(store, tmp_path / "whole", model=str(config)))
    chunks = {"use_chunked_training": True, "chunk_size": 10, "cpu_offload": True}
    parted = trained(long_config(store, tmp_path / "parts", model=str(config), **chunks))
    assert parted[0] == pytest.approx(whole[0], rel=1e-4)


def test_a_resumed_run_may_cut_otherwise_where_that_changes_nothing(store: Path, tmp_path: Path) -> None:
    expected = trained(long_config(store, tmp_path / "whole", steps=9))[0]
    ways = ({"use_chunked_training": True, "chunk_size": 7}, {}, {"use_chunked_training": True, "chunk_size": 16})
    found: list[float] = []
    for steps, way in zip((3, 6, 9), ways, strict=True):
        found += trained(long_config(store, tmp_path / "parts", steps=steps, **way))[0]
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_recurrent_run_keeps_its_cut_which_shapes_its_gradients(store: Path, tmp_path: Path) -> None:
    act = {"model": "act", "use_chunked_training": True, "steps": 2}
    losses, _ = trained(long_config(store, tmp_path / "run", **act, chunk_size=16))
    assert len(losses) == 2
    with pytest.raises(ConfigError, match="chunk_size: got 8, expected 16"):
        run_training(long_config(store, tmp_path / "run", **{**act, "steps": 4}, chunk_size=8))
    assert trained(long_config(store, tmp_path / "run", **{**act, "steps": 4}, chunk_size=16, cpu_offload=True))[0]


def test_a_recurrent_run_that_goes_back_through_all_chunks_learns_what_the_whole_does(
    store: Path, tmp_path: Path
) -> None:
    act = {"model": "act", "halt_max_steps": 2, "steps": 4}
    whole, _ = trained(long_config(store, tmp_path / "whole", **act))
    chunks = {"use_chunked_training": True, "chunk_size": 16}
    everything, _ = trained(long_config(store, tmp_path / "all", **act, **chunks, bptt_chunks="all"))
    one, _ = trained(long_config(store, tmp_path / "one", **act, **chunks))
    assert everything == pytest.approx(whole, rel=1e-4)
    assert one[0] == pytest.approx(whole[0], rel=1e-4)  # before the first step: reading is exact
    assert one[1:] != pytest.approx(whole[1:], rel=1e-6)


def test_auto_is_settled_once_and_kept(store: Path, tmp_path: Path) -> None:
    config = long_config(store, tmp_path / "run", use_chunked_training=True, chunk_size="auto", steps=2)
    run_training(config)
    assert RunFolder(tmp_path / "run").settings["chunk_size"] == 48  # no chunk is longer than a sequence
    run_training(long_config(store, tmp_path / "run", use_chunked_training=True, chunk_size="auto", steps=3))
    assert RunFolder(tmp_path / "run").settings["chunk_size"] == 48


@pytest.mark.parametrize(("gigabytes", "expected"), [(8, 1024), (10, 1024), (20, 2048), (24, 4096), (80, 4096)])
def test_the_advice_goes_by_memory(gigabytes: int, expected: int) -> None:
    assert advised_chunk_size(gigabytes * 10**9) == expected


def test_a_model_that_cannot_be_cut_is_refused_and_trains_without_chunks(store: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**REFUSED["attention of its own"][0], "vocab_size": 300}))
    with pytest.raises(ConfigError, match="leave it away, or choose a model whose tokens meet in attention alone"):
        run_training(long_config(store, tmp_path / "run", model=str(config), use_chunked_training=True))
    assert len(trained(long_config(store, tmp_path / "run", model=str(config)))[0]) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_chunked_training": True, "chunk_size": "16"}, r'chunk_size="16" \(text\) cannot work: expected 1 to'),
        ({"use_chunked_training": True, "chunk_size": 0}, "chunk_size=0 cannot work: expected 1 to .*, or auto"),
        ({"use_chunked_training": True, "chunk_size": "most"}, "chunk_size=most cannot work"),
        ({"use_chunked_training": True, "bptt_chunks": 0}, "bptt_chunks=0 cannot work: expected 1 to .*, or all"),
        ({"use_chunked_training": True, "bptt_chunks": True}, "bptt_chunks=True cannot work"),
        ({"use_chunked_training": True, "model": "counting"}, "means nothing to the counting model"),
        ({"cpu_offload": True}, "it needs --use-chunked-training"),
    ],
)
def test_settings_of_chunks_that_cannot_work_are_refused(
    store: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_training(long_config(store, tmp_path / "run", **changes))

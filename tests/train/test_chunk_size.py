"""Chunk sizes by memory."""

from __future__ import annotations

from pathlib import Path

from equipment.training import counting_config, make_store
from penstock.blocks import BlockManager
from penstock.observe.run_folder import RunFolder
from penstock.train.chunk_size import choose_chunk_size
from penstock.train.run import run_training


def test_more_memory_gives_larger_chunks_until_workers_would_go_short(tmp_path: Path) -> None:
    manifest = BlockManager(make_store(tmp_path, samples=960, block_size=400)).manifest
    sizes = [choose_chunk_size(manifest, 2, free) for free in (0, 1 << 18, 1 << 20, 1 << 40)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert sizes[-1] == 960 // 32
    assert choose_chunk_size(manifest, 4, 1 << 20) <= choose_chunk_size(manifest, 1, 1 << 20)


def test_auto_is_settled_when_a_run_begins_and_stays(store: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, tmp_path / "run", dataset_chunk_size="auto", steps=2))
    size = RunFolder(tmp_path / "run").settings["dataset_chunk_size"]
    assert isinstance(size, int)
    assert run_training(counting_config(store, tmp_path / "run", dataset_chunk_size="auto")).reason == "epoch"
    assert run_training(counting_config(store, tmp_path / "run", dataset_chunk_size=size)).reason == "epoch"

"""Independent workers beside ranks, on the demo's corpus: the loss on held-out text after the same epoch.

    python benchmarks/replicas.py [--epochs 1] [--json]

Both learn the same samples with the same global batch: ranks share a batch of 32 sequences and sum their gradients;
two workers learn 16 each and are averaged every few chunks. Asked: the workers' loss within 10 % of the ranks'.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from penstock import TrainingConfig, run_training
from penstock.blocks import BlockManager, ingest
from penstock.cli.demo import standard_library
from penstock.feed import Batch, ChunkFeed
from penstock.storage import LocalStorage
from penstock.train.device_batch import to_device
from penstock.train.parts import RunParts, embedded_ledger
from penstock.types import ChunkRef

HELD_OUT = 10
"""Every tenth file is held out."""
WAYS: dict[str, dict[str, Any]] = {
    "2 ranks, strided": {"ddp": True, "workers": 2, "plan": "strided", "batch_size": 32},
    "2 ranks, claims": {"ddp": True, "workers": 2, "plan": "claims", "batch_size": 32},
    "2 workers, averaged every 8 chunks": {"parallel_independent": True, "workers": 2, "batch_size": 16},
    "the same, outer momentum 0.5": {
        "parallel_independent": True,
        "workers": 2,
        "batch_size": 16,
        "outer_momentum": 0.5,
        "outer_learning_rate": 0.7,
    },
    "1 worker, batch of 16": {"batch_size": 16},
}


def make_stores(folder: Path) -> tuple[Path, Path]:
    ingest(standard_library(lambda place: place % HELD_OUT > 0), folder / "data", block_size=128, on_bad_row="skip")
    ingest(standard_library(lambda place: place % HELD_OUT == 0), folder / "held-out", 128, on_bad_row="skip")
    return folder / "data", folder / "held-out"


def batches_of(store: Path, parts: RunParts) -> Iterator[Batch]:
    blocks = BlockManager(str(store), dataset_chunk_size=8)
    feed = ChunkFeed(blocks, parts.tokenizer, batch_size=32, sequence_length=parts.config.max_seq_len)
    for block in blocks.manifest.blocks:
        for chunk_id in range(-(-block.sample_count // 8)):
            yield from feed.batches(ChunkRef(block.block_id, chunk_id))


def loss_on(store: Path, run_dir: Path, checkpoint_id: str) -> float:
    """The mean loss a token, of a run's checkpoint; of its first one, that of random weights."""
    storage = LocalStorage(run_dir)
    parts = RunParts(storage, embedded_ledger(storage))
    commit = next(commit for commit in parts.ledger.commits() if commit.checkpoint_id == checkpoint_id)
    trainer = parts.trainer()
    trainer.load_state(parts.checkpoints.read(checkpoint_id, commit.digest))
    losses = tokens = 0.0
    with torch.no_grad():
        for batch in batches_of(store, parts):
            fed = to_device(batch, trainer.device)
            losses += float(trainer.model.loss_sum(fed, slice(0, len(fed))))
            tokens += fed.num_tokens
    return losses / tokens


def measure(folder: Path, epochs: int) -> dict[str, dict[str, float]]:
    data, held_out = make_stores(folder)
    results: dict[str, dict[str, float]] = {}
    for number, (name, way) in enumerate(WAYS.items()):
        config = TrainingConfig(
            dataset_file=str(data),
            run_dir=str(folder / f"run-{number}"),
            dataset_chunk_size=8,
            vocab_size=1024,
            max_seq_len=128,
            learning_rate=3e-3,
            keep_checkpoints=10_000,
        )
        for setting, value in way.items():
            setattr(config, setting, value)
        began = time.perf_counter()
        result = run_training(config)
        for _ in range(1, epochs):
            config.iterate = config.stop_after_epoch = True
            result = run_training(config)
        results[name] = {
            "loss": loss_on(held_out, Path(config.run_dir), result.checkpoint_id),
            "steps": float(result.total_steps),
            "seconds": time.perf_counter() - began,
        }
    results["random weights"] = {"loss": loss_on(held_out, folder / "run-0", "00000000"), "steps": 0.0, "seconds": 0.0}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        results = measure(Path(folder), options.epochs)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    ranks = results["2 ranks, claims"]["loss"]
    print("| way | held-out loss | beside ranks | steps | seconds |\n|---|---|---|---|---|")
    for name, found in results.items():
        told = f"{found['loss']:.3f} | {found['loss'] / ranks:.3f} | {found['steps']:.0f} | {found['seconds']:.0f}"
        print(f"| {name} | {told} |")


if __name__ == "__main__":
    main()

"""Penstock feeds training data to any number of GPUs: every sample exactly once per epoch, through any crash.

The names below open on first use, so that ``import penstock`` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "BlockManager",
    "ChunkTracker",
    "DistributedLoader",
    "Mix",
    "R2DatasetLoader",
    "TrainingConfig",
    "chunked_segment_rollout",
    "ingest",
    "load_bucket_secrets",
    "process_raw_dataset_to_blocks",
    "run_training",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.blocks import BlockManager, ingest, process_raw_dataset_to_blocks
    from penstock.feed import DistributedLoader, Mix
    from penstock.ledger.tracker import ChunkTracker
    from penstock.pages import R2DatasetLoader
    from penstock.storage.buckets import load_bucket_secrets
    from penstock.train.config import TrainingConfig
    from penstock.train.long.rollout import chunked_segment_rollout
    from penstock.train.run import run_training

_HOMES = {
    "BlockManager": "penstock.blocks",
    "ChunkTracker": "penstock.ledger.tracker",
    "DistributedLoader": "penstock.feed",
    "Mix": "penstock.feed",
    "R2DatasetLoader": "penstock.pages",
    "TrainingConfig": "penstock.train.config",
    "chunked_segment_rollout": "penstock.train.long.rollout",
    "ingest": "penstock.blocks",
    "load_bucket_secrets": "penstock.storage.buckets",
    "process_raw_dataset_to_blocks": "penstock.blocks",
    "run_training": "penstock.train.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        from penstock.errors import MissingExtraError

        raise MissingExtraError(
            f"{name} needs {error.name}: install it with `pip install 'torch>=2.11' safetensors`"
        ) from error


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

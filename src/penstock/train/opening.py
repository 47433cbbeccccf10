"""A run's folder in the hands of one training: data looked at, folder locked, settings settled."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from penstock.blocks import BlockManager, Manifest
from penstock.blocks.manifest import MANIFEST_KEY
from penstock.errors import ConfigError, StorageBusy
from penstock.storage import LocalStorage, open_storage
from penstock.train.config import RunConfig, TrainingConfig
from penstock.train.data import make_blocks
from penstock.train.folders import writable_folder
from penstock.train.parts import RunParts, embedded_ledger
from penstock.train.settling import own_tokenizer, settle_config
from penstock.train.stopping import STOP_FILE, StopRequest

_LOCK_PATIENCE_S = 3.0


def open_run(config: TrainingConfig, devices: list[torch.device], stop: StopRequest, held: ExitStack) -> RunParts:
    """The parts of a run, begun or taken up again, with its folder locked for as long as `held` lasts."""
    config = replace(config)
    make_blocks(config, said=())
    if config.eval_file:
        _check_trainable(BlockManager(config.eval_file).manifest, config, config.eval_file)
    manifest = BlockManager(config.dataset_file, config.samples_per_block).manifest
    _check_trainable(manifest, config, config.dataset_file)
    storage = open_storage(config.run_dir or Path("runs", manifest.header.dataset_name))
    if isinstance(storage, LocalStorage) and storage.exists(MANIFEST_KEY):
        raise ConfigError(f"the run folder {storage.url} is a data set: name another folder with --run")
    storage = writable_folder(storage, what="run folder", remedy="name another with --run")
    _lock(storage, held)
    storage.discard_unfinished()
    stop.watch(storage.root / STOP_FILE)
    before = RunConfig.load(storage)
    named = config.ledger or (before.training.ledger if before else "")
    ledger = named or embedded_ledger(storage)
    settle_config(replace(config, ledger=named), manifest, storage, ledger, devices)
    return RunParts(storage, ledger)


def _lock(storage: LocalStorage, held: ExitStack) -> None:
    """Lock the run's folder. Ranks and workers of a training that was just killed may live for a moment yet."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            held.enter_context(storage.exclusive("run", purpose="training"))
            return
        except StorageBusy:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def _check_trainable(manifest: Manifest, config: TrainingConfig, name: str) -> None:
    header = manifest.header
    if header.text_column is None and header.token_column is None:
        raise ConfigError(f"{name} has no text column: only text can be trained on; ingest it with --text-column")
    if header.token_column is not None and not (config.tokenizer or own_tokenizer(config.model)):
        raise ConfigError(f"{name} came tokenised: name the tokenizer it was made with (--tokenizer tokenizer.json)")
    if not manifest.complete:
        raise ConfigError(f"{name} is not complete: finish `penstock ingest` first")
    if not manifest.total_samples:
        raise ConfigError(f"{name}, made from {header.source}, holds no samples: there is nothing to train on")

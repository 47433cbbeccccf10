"""The parts of a run, made from its folder: the same in the process that began it and in every worker."""

from __future__ import annotations

import os
from functools import cached_property

import torch
from safetensors.torch import load, save

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed import ChunkFeed, DistributedLoader, Tokenizer
from penstock.ledger import Ledger, Session, open_ledger
from penstock.storage import LocalStorage, Storage
from penstock.train.checkpoints import Checkpoints
from penstock.train.config import RunConfig, TrainingConfig
from penstock.train.models import build_model
from penstock.train.trainer import State, Trainer

TOKENIZER_KEY = "tokenizer.json"
REPLICAS_PREFIX = "replicas/"
LOADER_FIELDS = ("input_ids", "labels", "position_ids", "document_ids", "spans")


class RunParts:
    """Opens each part of a run on first use."""

    def __init__(self, storage: Storage, ledger: str) -> None:
        self.storage = storage
        self.ledger_url = ledger
        self.checkpoints = Checkpoints(storage)

    @cached_property
    def run_config(self) -> RunConfig:
        found = RunConfig.load(self.storage)
        if found is None:
            raise ConfigError(f"{self.storage.url} holds no run: expected its config.toml")
        return found

    @cached_property
    def config(self) -> TrainingConfig:
        return self.run_config.training

    @cached_property
    def blocks(self) -> BlockManager:
        return BlockManager(self.config.dataset_file, self.config.samples_per_block, self.config.dataset_chunk_size)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(
            self.storage.get(TOKENIZER_KEY).decode(),
            end_of_text=self.run_config.end_of_text or None,
            engine=self.run_config.tokenizer_engine,
        )

    @cached_property
    def ledger(self) -> Ledger:
        return open_ledger(
            self.ledger_url,
            identity=self.blocks.identity(),
            catalog=self.blocks,
            session_timeout_s=self.config.session_timeout_s,
        )

    @cached_property
    def feed(self) -> ChunkFeed:
        return ChunkFeed(
            self.blocks,
            self.tokenizer,
            batch_size=self.config.batch_size,
            sequence_length=self.config.max_seq_len,
        )

    def loader(self, rank: int, world: int) -> DistributedLoader:
        """The strided plan's batches, as one rank gets them."""
        return DistributedLoader(
            self.blocks,
            self.config.batch_size,
            self.config.seed,
            rank,
            world,
            tokenizer=self.tokenizer,
            sequence_length=self.config.max_seq_len,
            fields=LOADER_FIELDS,
        )

    def trainer(self) -> Trainer:
        """A fresh model from the run's seed, with its optimizer."""
        torch.manual_seed(self.config.seed)
        model = build_model(
            self.config.model,
            vocab_size=self.run_config.vocab_size,
            total_samples=self.run_config.dataset["total_samples"],
        )
        return Trainer(
            model,
            learning_rate=self.config.learning_rate,
            accumulation=self.config.gradient_accumulation_steps,
            max_grad_norm=self.config.max_grad_norm,
        )

    def submit(self, session: Session, state: State) -> str:
        """Lay a replica's state down for the supervisor; returns its key."""
        key = f"{REPLICAS_PREFIX}{session.session_id}.safetensors"
        self.storage.put(key, save(state))
        return key

    def submitted(self, key: str) -> State:
        return load(self.storage.get(key))

    def drop_submitted(self) -> None:
        for info in list(self.storage.list(REPLICAS_PREFIX)):
            self.storage.delete(info.key)
        self.storage.discard_unfinished(REPLICAS_PREFIX)

    @staticmethod
    def limit_threads(workers: int) -> None:
        """Share the machine's cores fairly: more threads than cores make every worker slower."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def embedded_ledger(storage: Storage) -> str:
    """Where the ledger of a run is unless its settings say otherwise; it needs a local folder."""
    if not isinstance(storage, LocalStorage):
        raise ConfigError(f"the run folder {storage.url} is not local: expected a path")
    return str(storage.root / "ledger.sqlite")

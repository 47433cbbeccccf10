"""The parts of a run, made from its folder: the same in the process that began it and in every worker."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import load, save

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed import ChunkFeed, DistributedLoader, Tokenizer
from penstock.ledger import Ledger, Session, open_ledger
from penstock.storage import LocalStorage, Storage
from penstock.train.checkpoints import Checkpoints
from penstock.train.config import MODELS, RunConfig, TrainingConfig
from penstock.train.evaluation import Evaluation
from penstock.train.events import Events
from penstock.train.models import Learner, build_model
from penstock.train.optimizers import AdamSettings
from penstock.train.ranks import Ranks
from penstock.train.schedule import Schedule
from penstock.train.staging import Staging
from penstock.train.trainer import InChunks, State, Trainer, first_state

TOKENIZER_KEY = "tokenizer.json"
MODEL_KEY = "model_config.json"
"""The config of a model of `transformers`, kept with the run: a resume asks no Hub and no folder for it."""
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
        size = self.config.dataset_chunk_size
        assert size != "auto"  # settled when the run began
        return BlockManager(self.config.dataset_file, self.config.samples_per_block, size)

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

    def staging(self, device: torch.device) -> Staging:
        return Staging(self.feed, device)

    def first_state(self, weights: State | None = None) -> State:
        """What the run begins with: a fresh model from its seed.

        Args:
            weights: What a model of `transformers` begins with instead, by its own names.
        """
        model = self._model()
        if weights is not None:
            from penstock.train.models.huggingface import CausalLM

            assert isinstance(model, CausalLM)
            model.take(weights)
        return first_state(model)

    def trainer(self, device: torch.device | None = None, ranks: Ranks | None = None) -> Trainer:
        """A fresh model from the run's seed, with its optimizer.

        Args:
            device: Where it computes; the CPU where not given.
            ranks: All ranks of a job. Those of a streamed one make it at the same time.
        """
        config = self.config
        model = self._model()
        settings: dict[str, Any] = {
            "schedule": Schedule(
                learning_rate=config.learning_rate,
                kind=config.lr_schedule,
                warmup_steps=config.warmup_steps,
                total_steps=config.schedule_steps or 0,
                min_ratio=config.min_lr_ratio,
            ),
            "adam": AdamSettings(weight_decay=config.weight_decay, beta1=config.beta1, beta2=config.beta2),
            "accumulation": config.gradient_accumulation_steps,
            "max_grad_norm": config.max_grad_norm,
            "precision": "bf16" if config.precision == "bf16" else "fp32",
            "on_nan": config.on_nan,
            "device": device,
        }
        if config.streamed:
            from penstock.train.streamed import StreamedTrainer

            return StreamedTrainer(
                model,
                gpu_budget_gib=config.gpu_budget_gib,
                offload_activations=config.offload_activations,
                ranks=ranks,
                **settings,
            )
        return Trainer(model, in_chunks=self._in_chunks(model), **settings)

    def _in_chunks(self, model: Learner) -> InChunks | None:
        """How sequences are learned that are not learned as a whole."""
        config = self.config
        if not config.use_chunked_training:
            return None
        from penstock.train.long.learning import ChunkSettings, learning_in_chunks

        assert config.chunk_size != "auto"  # settled when the run began
        settings = ChunkSettings(
            chunk_size=config.chunk_size, bptt_chunks=config.bptt_chunks, cpu_offload=config.cpu_offload
        )
        return learning_in_chunks(model, settings, config.max_seq_len)

    @cached_property
    def model_config(self) -> str:
        """The config of a model of `transformers`; empty for a built-in one."""
        return "" if self.config.model in MODELS else self.storage.get(MODEL_KEY).decode()

    def _model(self) -> Learner:
        torch.manual_seed(self.config.seed)
        return build_model(
            self.config.model,
            vocab_size=self.run_config.vocab_size,
            total_samples=self.run_config.dataset["total_samples"],
            config_json=self.model_config,
            across_documents=self.config.attend_across_documents,
            halt_max_steps=self.config.halt_max_steps,
        )

    def evaluation(self, events: Events, done_at: int) -> Evaluation | None:
        """What evaluates this run's states; None where there is nothing to evaluate on."""
        config = self.config
        if not config.eval_file:
            return None
        blocks = BlockManager(config.eval_file, config.samples_per_block)
        feed = ChunkFeed(blocks, self.tokenizer, batch_size=config.batch_size, sequence_length=config.max_seq_len)
        return Evaluation(
            feed, blocks, every=config.eval_every, batches=config.eval_batches, done_at=done_at, events=events
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

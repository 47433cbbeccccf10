"""What a training run is told, and what of it binds a run that resumes."""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from penstock.errors import ConfigError, differences
from penstock.ledger import without_secrets
from penstock.storage import Storage
from penstock.types import DatasetIdentity

if TYPE_CHECKING:
    from penstock.feed import EngineName, Tokenizer

CONFIG_KEY = "config.toml"

MODELS = ("tiny", "small", "counting")
"""Models by name; `train.models.build_model` makes them."""

_LARGEST = 2**31 - 1

MAY_CHANGE = frozenset(
    {
        "commit_every_chunks",
        "commit_every_s",
        "dataset_file",
        "ddp",
        "iterate",
        "keep_checkpoints",
        "ledger",
        "log_file",
        "parallel_independent",
        "rank_timeout_s",
        "respawn",
        "run_dir",
        "session_timeout_s",
        "stall_timeout_s",
        "steps",
        "stop_after_epoch",
        "workers",
    }
)
"""Settings a resumed run may have otherwise than before; all others shape the result and must stay."""


@dataclass(slots=True, kw_only=True)
class TrainingConfig:
    """Settings of a run, free to assign to until `run_training` reads them."""

    dataset_file: str = ""
    """The data set: a block store, a file, a folder, a glob, ``hf://name[:config[:split]]`` or ``s3://...``."""
    run_dir: str = ""
    """The run's folder; a folder with a run in it resumes that run. Empty: ``runs/<data set's name>``."""
    model: str = "tiny"
    """A built-in model by name: tiny, small, or counting (which counts how often each sample was learned)."""
    tokenizer: str = ""
    """A tokenizer.json, a folder with one, a *.tiktoken file or a model of the Hub (``owner/name[@revision]``); behind
    it, ``?end_of_text=TOKEN``. A copy is kept with the run. Empty: a byte-level BPE is trained on the data."""
    vocab_size: int = 4096
    """Entries of a tokenizer trained here."""
    samples_per_block: int = 100_000
    """Samples a block when blocks are made; a block store brings its own."""
    dataset_chunk_size: int = 4_000
    """Samples a chunk: what a worker claims, reads and holds at a time."""
    batch_size: int = 8
    """Sequences an optimizer step; in parallel-independent mode, of each replica."""
    max_seq_len: int = 256
    """Tokens a sequence."""
    gradient_accumulation_steps: int = 1
    """Parts a batch is computed in."""
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    seed: int = 0
    steps: int | None = None
    """Stop when the run has this many optimizer steps in all, summed over replicas."""
    stop_after_epoch: bool = False
    """Stop at the end of the epoch, even with `iterate`."""
    iterate: bool = False
    """Begin another epoch at the end of one; otherwise the run stops there."""
    parallel_independent: bool = False
    """Several workers, each with its own replica, merged at every commit."""
    workers: int = 1
    """How many, in parallel-independent mode; with `ddp`, how many ranks to start where no launcher has."""
    ddp: bool = False
    """Ranks that learn every batch together, as under torchrun: each its share, gradients summed."""
    plan: Literal["", "claims", "strided"] = ""
    """Where batches come from: chunks claimed from the ledger, or a shuffled order that is the same for any number of
    ranks. Empty: as the run began; for a new one strided with `ddp`, else claims."""
    outer_learning_rate: float = 1.0
    """Of what replicas have changed on average, so much is taken over at a merge;"""
    outer_momentum: float = 0.0
    """with Nesterov momentum, where it is above 0."""
    respawn: int = 0
    """How often workers that died are started again, in all; of ranks, how often the job is."""
    merge: Literal["mean", "sum"] = "mean"
    """How replicas become one: their mean weighted by samples, or the sum of what each has changed."""
    commit_every_chunks: int = 8
    """Commit after this many chunks, counted over all workers,"""
    commit_every_s: float = 300.0
    """or after this many seconds, in the middle of a chunk if need be: no crash costs more than that."""
    keep_checkpoints: int = 3
    """How many checkpoints stay on disk."""
    session_timeout_s: float = 60.0
    """How long a worker that shows no sign of life keeps its chunks."""
    stall_timeout_s: float = 3_600.0
    """How long a worker or rank may take for one step before it counts as hung and is killed."""
    rank_timeout_s: float = 600.0
    """How long ranks wait for one another: a rank that is silent for longer has the others give up."""
    ledger: str = field(default="", repr=False)
    """Where the ledger is: ``postgresql://user@host/database?run=name`` for workers on several machines. Empty:
    ledger.sqlite in the run's folder. A password is used and never saved: give it again, or by PGPASSWORD."""
    log_file: str = ""
    """Where metrics go. Empty: metrics.jsonl in the run's folder."""

    def check(self) -> None:
        """Refuse what cannot work, naming the setting."""
        at_least = {
            "batch_size": 1,
            "commit_every_chunks": 1,
            "dataset_chunk_size": 1,
            "gradient_accumulation_steps": 1,
            "keep_checkpoints": 1,
            "max_seq_len": 2,
            "samples_per_block": 1,
            "vocab_size": 1,
            "workers": 1,
        }
        for name, least in at_least.items():
            if not least <= getattr(self, name) <= _LARGEST:
                raise ConfigError(f"{name}={getattr(self, name)} cannot work: expected {least} to {_LARGEST}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} cannot work: expected 0 to 2**63 - 1")
        if self.model not in MODELS:
            raise ConfigError(f"model={self.model!r} is unknown: expected one of {', '.join(MODELS)}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps={self.steps} trains nothing: expected 1 or more, or none for the whole epoch")
        if not self.dataset_file:
            raise ConfigError("dataset_file is empty: name a block store (--dataset-file)")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"learning_rate={self.learning_rate} cannot work: expected a number above 0")
        if not (self.max_grad_norm >= 0 and math.isfinite(self.max_grad_norm)):
            raise ConfigError(f"max_grad_norm={self.max_grad_norm} cannot work: expected 0 or more")
        if not self.commit_every_s > 0:
            raise ConfigError(f"commit_every_s={self.commit_every_s} cannot work: expected seconds above 0")
        if not (self.session_timeout_s > 0 and math.isfinite(self.session_timeout_s)):
            raise ConfigError(f"session_timeout_s={self.session_timeout_s} cannot work: expected seconds above 0")
        if self.merge not in ("mean", "sum"):
            raise ConfigError(f"merge={self.merge!r} is unknown: expected 'mean' or 'sum'")
        if self.plan not in ("", "claims", "strided"):
            raise ConfigError(f"plan={self.plan!r} is unknown: expected 'claims' or 'strided'")
        self._check_several()

    def _check_several(self) -> None:
        """The settings of several workers, by themselves and against one another."""
        for name in ("stall_timeout_s", "rank_timeout_s"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)} cannot work: expected seconds above 0")
        if not (self.outer_learning_rate > 0 and math.isfinite(self.outer_learning_rate)):
            raise ConfigError(f"outer_learning_rate={self.outer_learning_rate} cannot work: expected a number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"outer_momentum={self.outer_momentum} cannot work: expected 0 to below 1")
        if not 0 <= self.respawn <= _LARGEST:
            raise ConfigError(f"respawn={self.respawn} cannot work: expected 0 or more")
        if self.parallel_independent and self.ddp:
            raise ConfigError("parallel_independent and ddp are two ways to use several workers: choose one")
        if self.parallel_independent and self.plan == "strided":
            raise ConfigError("plan='strided' deals every batch to all ranks: it needs --ddp, or one worker")
        if self.workers > 1 and not (self.parallel_independent or self.ddp):
            raise ConfigError(f"workers={self.workers} needs --parallel-independent or --ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The resolved settings of a run, with what its data turned out to be. Saved as the run's config.toml."""

    settings: dict[str, Any]
    """The fields of `TrainingConfig`."""
    dataset: dict[str, Any]
    """Identity, name and size of the data set."""
    tokenizer_fingerprint: str
    vocab_size: int
    tokenizer_engine: EngineName = "tokenizers"
    """Chosen when the run began, and kept: engines may differ in a text nobody has tried."""
    end_of_text: str = ""
    """The token that ends a document; empty in runs of before, which found it among the usual ones."""

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(**self.settings)

    def save(self, storage: Storage) -> None:
        told = {key: value for key, value in self.settings.items() if value is not None}  # TOML knows no null
        text = tomli_w.dumps({**asdict(self), "settings": told})
        storage.put(CONFIG_KEY, text.encode())

    @classmethod
    def load(cls, storage: Storage) -> RunConfig | None:
        """The config of an existing run, or None where no run has begun."""
        if not storage.exists(CONFIG_KEY):
            return None
        try:
            found = cls(**tomllib.loads(storage.get(CONFIG_KEY).decode()))
            _ = found.training, found.dataset["dataset_id"], found.dataset["total_samples"]
            return found
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{storage.url}/{CONFIG_KEY} is damaged: {error}: restore it, or begin a new run"
            ) from error

    def refuse_changes(self, before: RunConfig, where: str) -> None:
        """A resumed run must be the same run: name every setting that would make it another."""
        different = differences(self._binding(), before._binding())
        if different:
            raise ConfigError(
                f"{where} was begun with other settings: {'; '.join(different)}: "
                "go back to those, or name another run folder"
            )

    def _binding(self) -> dict[str, object]:
        shaping = {field.name for field in fields(TrainingConfig)} - MAY_CHANGE - {"tokenizer"}
        return {
            **{name: self.settings.get(name) for name in sorted(shaping)},
            "dataset_id": self.dataset["dataset_id"],
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }


def resolve(
    config: TrainingConfig,
    *,
    before: RunConfig | None = None,
    identity: DatasetIdentity,
    name: str,
    total_samples: int,
    tokenizer: Tokenizer,
) -> RunConfig:
    """Freeze the settings together with what the data set and the tokenizer turned out to be; paths become absolute."""
    settled = replace(config)
    settled.plan = config.plan or (before.training.plan if before else "") or ("strided" if config.ddp else "claims")
    if settled.plan == "strided" and config.parallel_independent:
        raise ConfigError("this run follows the strided plan, which has no independent workers: go on with --ddp")
    if "://" not in config.dataset_file:
        settled.dataset_file = str(Path(config.dataset_file).resolve())
    if config.ledger:
        settled.ledger = without_secrets(config.ledger)
    if config.log_file:
        settled.log_file = str(Path(config.log_file).resolve())
    return RunConfig(
        settings=asdict(settled),
        dataset={**identity.as_dict(), "name": name, "total_samples": total_samples},
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        tokenizer_engine=tokenizer.engine,
        end_of_text=tokenizer.end_of_text,
    )

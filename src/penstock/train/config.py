"""What a training run is told, and what of it binds a run that resumes."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from penstock.errors import ConfigError, differences
from penstock.ledger import without_secrets
from penstock.storage import Storage
from penstock.train.checks import check
from penstock.types import DatasetIdentity

if TYPE_CHECKING:
    from penstock.feed import EngineName, Tokenizer

CONFIG_KEY = "config.toml"

MODELS = ("tiny", "small", "act", "counting")
"""Built-in models by name; any other name is a folder, a config.json or a model of the Hub."""

MAY_CHANGE = frozenset(
    {
        "commit_every_chunks",
        "commit_every_s",
        "cpu_offload",
        "cuda_ids",
        "dataset_file",
        "dataset_source",
        "ddp",
        "device",
        "eval_batches",
        "eval_every",
        "eval_file",
        "eval_source",
        "gpu_budget_gib",
        "iterate",
        "keep_checkpoints",
        "ledger",
        "log_file",
        "offload_activations",
        "on_nan",
        "parallel_independent",
        "rank_timeout_s",
        "respawn",
        "run_dir",
        "session_timeout_s",
        "stall_timeout_s",
        "steps",
        "stop_after_epoch",
        "streamed",
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
    """A built-in model by name: tiny, small, act (recurrent) or counting (how often each sample was learned). Else a
    causal language model of `transformers`: a folder, a config.json, or ``owner/name[@revision]`` of the Hub."""
    fresh_weights: bool = False
    """Begin with random weights, though the model came with some."""
    resize_embeddings: bool = False
    """Add embeddings to a model whose vocabulary is smaller than the tokenizer's; otherwise that is refused."""
    attend_across_documents: bool = False
    """Let documents that share a sequence see each other; some kernels are faster so."""
    tokenizer: str = ""
    """A tokenizer.json, a folder with one, a *.tiktoken file or a model of the Hub (``owner/name[@revision]``); behind
    it, ``?end_of_text=TOKEN``. A copy is kept with the run. Empty: the model's own where it has one, else a byte-level
    BPE is trained on the data."""
    vocab_size: int = 4096
    """Entries of a tokenizer trained here."""
    samples_per_block: int = 100_000
    """Samples a block when blocks are made; a block store brings its own."""
    dataset_chunk_size: int | Literal["auto"] = 4_000
    """Samples a chunk: what a worker claims, reads and holds at a time. ``auto``: by the memory there is."""
    batch_size: int = 8
    """Sequences an optimizer step; in parallel-independent mode, of each replica."""
    max_seq_len: int = 256
    """Tokens a sequence."""
    gradient_accumulation_steps: int = 1
    """Parts a batch is computed in."""
    use_chunked_training: bool = False
    """Learn sequences in chunks of tokens: memory is set by the chunk, however long sequences are."""
    chunk_size: int | Literal["auto"] = 2_048
    """Tokens of such a chunk. ``auto``: the largest that fits, by trying."""
    bptt_chunks: int | Literal["all"] = 1
    """Chunks that the gradients of a recurrent model go back through; those of others go back through all."""
    cpu_offload: bool = False
    """Keep what chunks leave for others (keys, values, a carry) in host memory."""
    streamed: bool = False
    """Hold weights and optimizer in host memory, and bring layers to the device as they are needed: for models larger
    than it. Several devices or workers are ranks, as with `ddp`."""
    gpu_budget_gib: float | None = None
    """Memory of the device that a streamed run may use; what is left of it keeps layers there. None: nearly all."""
    offload_activations: bool = False
    """Keep the states between layers of a streamed run in host memory too."""
    learning_rate: float = 1e-3
    """The greatest one, where there is a schedule."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How it goes down after the warm-up, by the run's steps."""
    warmup_steps: int = 0
    """Steps over which it goes up from 0."""
    schedule_steps: int | None = None
    """The step at which it is lowest. None: what `steps` was when the run began."""
    min_lr_ratio: float = 0.1
    """The lowest learning rate as a share of the greatest."""
    weight_decay: float = 0.1
    """Of matrices and embeddings; norms and biases do not decay."""
    beta1: float = 0.9
    beta2: float = 0.95
    """AdamW's memories of gradients and of their squares."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do with a batch whose loss or gradients are not finite: stop, or leave it and count it as seen."""
    halt_max_steps: int = 1
    """How often a recurrent model may ponder; of no meaning to others."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """What the model computes in; its weights are fp32 always. ``auto``: bf16 on CUDA devices that know it."""
    seed: int = 0
    steps: int | None = None
    """Stop when the run has this many optimizer steps in all, summed over replicas."""
    stop_after_epoch: bool = False
    """Stop at the end of the epoch, even with `iterate`."""
    iterate: bool = False
    """Begin another epoch at the end of one; otherwise the run stops there."""
    parallel_independent: bool = False
    """Several workers, each with its own replica, merged at every commit."""
    ddp: bool = False
    """Ranks that learn every batch together, as under torchrun: each its share, gradients summed."""
    workers: int = 1
    """How many, in parallel-independent mode; with `ddp`, how many ranks to start where no launcher has; with
    `cuda_ids`, one a device."""
    plan: Literal["", "claims", "strided"] = ""
    """Where batches come from: chunks claimed from the ledger, or a shuffled order that is the same for any number of
    ranks. Empty: as the run began; for a new one strided with `ddp`, else claims."""
    outer_learning_rate: float = 1.0
    """Of what replicas have changed on average, so much is taken over at a merge;"""
    outer_momentum: float = 0.0
    """with Nesterov momentum, where it is above 0."""
    respawn: int = 0
    """How often workers that died are started again, in all; of ranks, how often the job is."""
    cuda_ids: str = ""
    """CUDA devices by number, ``0,1``: one worker on each."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: CUDA where there is such a device."""
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
    eval_file: str = ""
    """A data set to evaluate on, named as `dataset_file` is: at the end, and"""
    eval_every: int = 0
    """at the first commit behind every so many steps; 0: at the end alone."""
    eval_batches: int | None = None
    """How many batches of it; None: all."""

    @property
    def cuda_indices(self) -> list[int]:
        """`cuda_ids` as numbers."""
        return [int(part) for part in self.cuda_ids.split(",")] if self.cuda_ids else []

    dataset_source: str = ""
    """What `dataset_file` was made of, where its blocks are in the cache folder: they are made again if that is gone.
    Noted by itself."""
    eval_source: str = ""
    """The same of `eval_file`."""

    def check(self) -> None:
        """Refuse what cannot work, naming the setting."""
        check(self)


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
        if self.training.model != "act":  # elsewhere the gradients are the same for any cut, and for none
            shaping -= {"use_chunked_training", "chunk_size", "bptt_chunks"}
        return {
            **{name: getattr(self.training, name) for name in sorted(shaping)},
            "dataset_id": self.dataset["dataset_id"],
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }


def resolve(
    config: TrainingConfig,
    *,
    identity: DatasetIdentity,
    name: str,
    total_samples: int,
    tokenizer: Tokenizer,
) -> RunConfig:
    """Freeze the settings together with what the data set and the tokenizer turned out to be; paths become absolute."""
    settled = replace(config)
    if "://" not in config.dataset_file:
        settled.dataset_file = str(Path(config.dataset_file).resolve())
    if config.eval_file and "://" not in config.eval_file:
        settled.eval_file = str(Path(config.eval_file).resolve())
    if config.model not in MODELS and Path(config.model).exists():
        settled.model = str(Path(config.model).resolve())
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

"""Settings that cannot work, refused by name before anything is begun."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.train.config import TrainingConfig

_ABOVE_0 = {
    "learning_rate": 1e30,
    "outer_learning_rate": 1e30,
    "session_timeout_s": sys.float_info.max,
    "stall_timeout_s": sys.float_info.max,
    "rank_timeout_s": sys.float_info.max,
}
_LARGEST = 2**31 - 1

_AT_LEAST = {
    "batch_size": 1,
    "bptt_chunks": 1,
    "chunk_size": 1,
    "commit_every_chunks": 1,
    "dataset_chunk_size": 1,
    "eval_batches": 1,
    "eval_every": 0,
    "gradient_accumulation_steps": 1,
    "halt_max_steps": 1,
    "keep_checkpoints": 1,
    "max_seq_len": 2,
    "respawn": 0,
    "samples_per_block": 1,
    "schedule_steps": 1,
    "vocab_size": 1,
    "warmup_steps": 0,
    "workers": 1,
}

_WORDS = {"dataset_chunk_size": "auto", "chunk_size": "auto", "bptt_chunks": "all"}
"""What may be said instead of a number."""

_CHOICES = {
    "lr_schedule": ("constant", "cosine", "linear"),
    "merge": ("mean", "sum"),
    "plan": ("", "claims", "strided"),
    "on_nan": ("stop", "skip"),
    "precision": ("auto", "fp32", "bf16"),
}


def check(config: TrainingConfig) -> None:
    """Refuse what cannot work, naming the setting."""
    _check_numbers(config)
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is unknown: expected one of {', '.join(filter(None, choices))}"
            )
    if config.steps is not None and config.steps < 1:
        raise ConfigError(f"steps={config.steps} trains nothing: expected 1 or more, or none for the whole epoch")
    if not config.dataset_file:
        raise ConfigError("dataset_file is empty: name a data set (--dataset-file), or a run to resume (--run)")
    if not config.model:
        raise ConfigError("model is empty: expected tiny, small, act, a folder, a config.json or a model of the Hub")
    _check_schedule(config)
    _check_devices(config)
    _check_chunks(config)
    _check_streamed(config)
    if config.eval_every and not config.eval_file:
        raise ConfigError(f"eval_every={config.eval_every} needs something to evaluate on (--eval-file)")
    if config.eval_file and config.model == "counting":
        raise ConfigError("eval_file means nothing to the counting model, which predicts nothing: leave it away")


def _check_numbers(config: TrainingConfig) -> None:
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        word = _WORDS.get(name)
        if value is None or (word is not None and value == word):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            or_word = f", or {word}" if word else ""
            told = f'"{value}" (text)' if isinstance(value, str) and value.isdecimal() else value
            raise ConfigError(f"{name}={told} cannot work: expected {least} to {_LARGEST}{or_word}")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed} cannot work: expected 0 to 2**63 - 1")
    for name, most in _ABOVE_0.items():
        if not 0 < getattr(config, name) <= most:
            up_to = f" and up to {most:g}" if most < sys.float_info.max else ""
            raise ConfigError(f"{name}={getattr(config, name)} cannot work: expected a number above 0{up_to}")
    for name in ("max_grad_norm", "weight_decay"):
        if not (getattr(config, name) >= 0 and math.isfinite(getattr(config, name))):
            raise ConfigError(f"{name}={getattr(config, name)} cannot work: expected 0 or more")
    for name in ("beta1", "beta2", "outer_momentum"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} cannot work: expected 0 to less than 1")
    if not 0 <= config.min_lr_ratio <= 1:
        raise ConfigError(f"min_lr_ratio={config.min_lr_ratio} cannot work: expected 0 to 1")
    if not config.commit_every_s > 0:
        raise ConfigError(f"commit_every_s={config.commit_every_s} cannot work: expected seconds above 0")


def _check_schedule(config: TrainingConfig) -> None:
    total = config.schedule_steps or config.steps
    if config.lr_schedule != "constant" and total is None:
        raise ConfigError(
            f"lr_schedule={config.lr_schedule!r} needs to know where it ends: give --steps or --schedule-steps"
        )
    if config.lr_schedule != "constant" and config.schedule_steps and config.warmup_steps > config.schedule_steps:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} goes beyond schedule_steps={config.schedule_steps}: lower one of them"
        )


def _check_chunks(config: TrainingConfig) -> None:
    if config.use_chunked_training and config.model == "counting":
        raise ConfigError(
            "use_chunked_training means nothing to the counting model, which reads no sequences: leave it away"
        )
    if config.cpu_offload and not config.use_chunked_training:
        raise ConfigError("cpu_offload is about what chunks leave for others: it needs --use-chunked-training")


def _check_streamed(config: TrainingConfig) -> None:
    if not config.streamed:
        for name in ("gpu_budget_gib", "offload_activations"):
            if getattr(config, name):
                raise ConfigError(f"{name}={getattr(config, name)} is about streamed models: it needs --streamed")
        return
    from penstock.train.config import MODELS

    if config.model in MODELS:
        raise ConfigError(
            f"model={config.model!r} is small and built in, and cannot be streamed: name a model of transformers "
            "(--model, a folder, a config.json or owner/name), or leave --streamed away"
        )
    if config.parallel_independent:
        raise ConfigError(
            "streamed and parallel_independent exclude each other, since every replica would hold the whole model: "
            "several --workers or --devices of a streamed run share one copy without it"
        )
    if config.use_chunked_training:
        raise ConfigError(
            "streamed and use_chunked_training exclude each other: leave one away; for longer sequences a streamed run "
            "has --offload-activations and --gradient-accumulation-steps"
        )
    budget = config.gpu_budget_gib
    if budget is not None and not 0 < budget < 2**20:
        raise ConfigError(f"gpu_budget_gib={budget} cannot work: expected GiB above 0, or none for nearly all there is")


def check_device(name: str) -> None:
    """Refuse what names no device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device={name!r} is unknown: expected auto, cpu, cuda or cuda:0")


def _check_devices(config: TrainingConfig) -> None:
    if not re.fullmatch(r"(\d+(,\d+)*)?", config.cuda_ids):
        raise ConfigError(f"cuda_ids={config.cuda_ids!r} is no list of devices: expected numbers, as in 0,1")
    check_device(config.device)
    if config.parallel_independent and config.ddp:
        raise ConfigError("parallel_independent and ddp exclude each other: choose one")
    if config.parallel_independent and config.plan == "strided":
        raise ConfigError("plan='strided' deals every batch to all ranks: it needs --ddp, or one worker")
    several = config.parallel_independent or config.ddp or config.streamed
    if len(config.cuda_indices) > 1 and not several:
        raise ConfigError(
            f"cuda_ids={config.cuda_ids!r} names several devices: use them with --parallel-independent, --ddp or "
            "--streamed"
        )
    if config.cuda_ids and config.device == "cpu":
        raise ConfigError(f"cuda_ids={config.cuda_ids!r} and device='cpu' exclude each other: leave one away")
    if config.cuda_ids and config.workers not in (1, len(config.cuda_indices)):
        raise ConfigError(f"workers={config.workers} and cuda_ids={config.cuda_ids!r} disagree: leave workers away")
    if config.workers > 1 and not several:
        raise ConfigError(f"workers={config.workers} needs --parallel-independent, --ddp or --streamed")

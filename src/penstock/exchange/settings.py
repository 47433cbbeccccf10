"""What a run of the exchange is: settled once, by whoever begins it, and the same for everybody."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import orjson

from penstock.errors import ConfigError, ExchangeError
from penstock.exchange.keys import VERSION, check_name

Inner = Literal["gradient", "adamw"]
Codec = Literal["dct", "topk", "dense"]
AggregateCodec = Literal["int8", "dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """Settings of a run; `penstock exchange aggregator --config` reads them from a TOML file."""

    run: str
    """The run's name: the first part of every key."""
    model: str = "tiny"
    """A built-in model by name, or a causal language model of transformers: a folder, a config.json, a Hub id."""
    tokenizer: str = ""
    """As `penstock train` takes it; a copy is kept with the run."""
    seed: int = 0
    """Of the first weights."""
    miners: tuple[str, ...] = ()
    """Who may contribute when the run begins; `penstock exchange admit` adds to them."""
    validator: str = "validator"
    """Whose scores and peer list count."""
    seats: int = 16
    """Contributions of a window; who has no seat is a reserve."""
    window_s: float = 600.0
    """How long a window is open, by the store's clock; shorter where all seats are taken."""
    grace_s: float = 30.0
    """How much later a contribution may still come."""
    min_contributions: int = 1
    """With fewer a window stays open, for another `window_s` at a time."""
    n_pages: int = 6
    """Pages a miner reads in a window,"""
    num_rows_per_page: int = 100
    """of so many rows,"""
    split: str = "train"
    dataset_subfolder: str = ""
    """where in the dataset bucket they lie. Empty: R2DatasetLoader's DATASET_SUBFOLDER."""
    text_column: str = ""
    batch_size: int = 8
    """Sequences of a batch,"""
    sequence_length: int = 1024
    """of so many tokens."""
    inner: Inner = "adamw"
    """What a miner does with its pages: ``adamw`` learns batch after batch and sends what that changed; ``gradient``
    sends the gradient of the mean loss over all of them, as ordinary data parallelism does."""
    inner_learning_rate: float = 4e-4
    """Of AdamW; of no meaning to ``gradient``."""
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    outer_learning_rate: float = 0.7
    """How much of the contributions' mean is taken over."""
    codec: Codec = "dct"
    """How contributions are made small: the largest coefficients of a chunked cosine transform, the largest values, or
    all of them in fp32."""
    chunk_side: int = 64
    """A chunk is so many times so many values."""
    top_k: int = 64
    """Values sent of a chunk."""
    momentum: float = 0.999
    """What is left of what was not sent, a window later: error feedback."""
    aggregate_codec: AggregateCodec = "int8"
    """How the aggregate is published: 8 bits a weight, or fp32."""
    norm_factor: float = 10.0
    """A contribution whose norm is so many times greater, or smaller, than is usual is rejected."""
    max_norm: float = 10_000.0
    """Whatever is usual, no contribution has a greater norm: what the first ever sends cannot ruin the weights."""
    checkpoint_every: int = 10
    """Windows between checkpoints."""
    keep_checkpoints: int = 3
    """The newest so many checkpoints, and all aggregates behind the oldest of them, are kept,"""
    keep_contributions: int = 6
    """contributions of the last so many windows,"""
    keep_manifests: int = 10_000
    """and manifests and scores of so many."""
    random_pages: int = 2
    """Pages that all miners of a window are measured on, beside those they were to read."""

    def __post_init__(self) -> None:
        check_name(self.run, "run")
        check_name(self.validator, "validator")
        if isinstance(self.miners, str):
            raise ConfigError(f"miners={self.miners!r} is one text: expected a list of names")
        object.__setattr__(self, "miners", tuple(self.miners))
        for uid in self.miners:
            check_name(uid, "uid")
        if len(set(self.miners)) != len(self.miners):
            raise ConfigError(f"miners={list(self.miners)} names somebody twice: expected each once")
        self._check_numbers()
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: expected {' or '.join(allowed)}")
        if not 2 <= self.chunk_side <= 256 or not 0 < self.top_k <= self.chunk_side**2 or self.top_k % 8:
            raise ConfigError(
                f"top_k={self.top_k} of chunk_side={self.chunk_side}: expected a side from 2 to 256, and a multiple of "
                f"8 up to {self.chunk_side**2}"
            )

    def _check_numbers(self) -> None:
        least = dict.fromkeys(_COUNTS, 1) | {"keep_checkpoints": 2, "keep_contributions": 2, "sequence_length": 2}
        for name, at_least in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < at_least:
                raise ConfigError(f"{name}={value!r} cannot be: expected a whole number from {at_least} on")
        for name in (*_POSITIVE, *_NOT_NEGATIVE):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name}={value!r} cannot be: expected a number, 0 or more")
            if name in _POSITIVE and not value:
                raise ConfigError(f"{name}={value!r} cannot be: expected a number above 0")
        if self.momentum > 1 or self.norm_factor <= 1:
            raise ConfigError(
                f"momentum={self.momentum}, norm_factor={self.norm_factor}: expected a momentum from 0 to 1, and a "
                "factor above 1"
            )
        if type(self.seed) is not int or not -(1 << 63) <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed!r} cannot be: expected a whole number of at most 64 bits")

    @classmethod
    def from_dict(cls, told: dict[str, Any], where: str) -> ExchangeSettings:
        """Settings as JSON or TOML holds them; what is unknown is refused by name."""
        known = {each.name for each in fields(cls)}
        unknown = sorted(told.keys() - known)
        if unknown or "run" not in told:
            problem = f"unknown settings {', '.join(unknown)}" if unknown else "run is not set"
            raise ConfigError(f"{where}: {problem}: expected some of {', '.join(sorted(known))}")
        try:
            return cls(**told)
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "miners": list(self.miners)}


_COUNTS = (
    "seats",
    "min_contributions",
    "n_pages",
    "num_rows_per_page",
    "batch_size",
    "sequence_length",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_contributions",
    "keep_manifests",
    "random_pages",
    "top_k",
    "chunk_side",
)
_POSITIVE = ("window_s", "inner_learning_rate", "max_grad_norm", "outer_learning_rate", "norm_factor", "max_norm")
_NOT_NEGATIVE = ("grace_s", "weight_decay", "momentum")
_CHOICES = {
    "inner": ("adamw", "gradient"),
    "codec": ("dct", "topk", "dense"),
    "aggregate_codec": ("int8", "dense"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What ``run.json`` holds: the settings, and what data, tokenizer and model turned out to be."""

    settings: ExchangeSettings
    dataset_id: str
    tokenizer_sha256: str
    end_of_text: str
    vocab_size: int
    model_config: str
    """The config of a model of transformers; empty for a built-in one."""
    layout: tuple[tuple[str, tuple[int, ...]], ...] = field(repr=False)
    """Name and shape of every weight, in the order in which they lie in artifacts."""
    version: str = VERSION

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for _, shape in self.layout)

    def as_dict(self) -> dict[str, Any]:
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("settings", "layout")}
        layout = [[name, list(shape)] for name, shape in self.layout]
        return {**told, "settings": self.settings.as_dict(), "layout": layout}

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> RunFacts:
        try:
            return cls._from_dict(orjson.loads(data), where)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ExchangeError(f"{where} is damaged: {error}") from error

    @classmethod
    def _from_dict(cls, told: dict[str, Any], where: str) -> RunFacts:
        if told.get("version") != VERSION:
            raise ConfigError(f"{where} has version {told.get('version')!r}, expected {VERSION!r}: update penstock")
        settings = ExchangeSettings.from_dict(told["settings"], where)
        layout = tuple((name, tuple(shape)) for name, shape in told["layout"])
        return cls(**{**told, "settings": settings, "layout": layout})

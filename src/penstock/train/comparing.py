"""The same training on one device, and on more and more of them: how much faster, and whether it learns the same.

Every size is a run of its own, begun anew with the same seed, data and batches; only how many ranks share a batch
differs. So losses are to agree step by step, but for the order in which numbers are added up.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from penstock.blocks import ingest
from penstock.train.config import MODELS, TrainingConfig
from penstock.train.run import run_training

_WORDS = 400
_WARM_UP = 2
"""Steps that are not timed, where there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of one number of ranks."""

    world: int
    step_s: float
    """Median, waiting for data included, without the first steps."""
    tokens_per_s: float
    mfu: float | None
    losses: list[float]


@dataclass(slots=True)
class _Steps:
    """Hears the steps of a run."""

    heard: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self.heard.append(event)


def compare(config: TrainingConfig, worlds: Sequence[int], folder: Path) -> Iterator[Measured]:
    """Train with so many ranks after another, each in a run folder of its own, and say how each went.

    Args:
        config: Its `cuda_ids` are the devices to take from; without, ranks go where its `device` says.
        worlds: How many ranks, each in turn.
        folder: For run folders.
    """
    for world in worlds:
        devices = ",".join(map(str, config.cuda_indices[:world]))
        steps = _Steps()
        run_training(
            replace(
                config,
                run_dir=str(folder / f"ranks-{world}"),
                ddp=True,
                plan="strided",
                workers=world,
                cuda_ids=devices,
                iterate=True,
                stop_after_epoch=False,
                commit_every_s=1e9,
                keep_checkpoints=1,
            ),
            [steps],
        )
        yield _measured(world, steps.heard)


def largest_difference(found: Sequence[Measured]) -> float:
    """Of losses of the same step, relative to those of the fewest ranks."""
    first = found[0].losses
    gaps = [
        abs(one - other) / max(1e-12, abs(one))
        for each in found[1:]
        for one, other in zip(first, each.losses, strict=True)
    ]
    return max(gaps, default=0.0)


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4 and so on, and the largest itself."""
    doubled = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return [*doubled, largest]


def make_up_data(folder: Path, tokens: int, seed: int = 0) -> Path:
    """A block store of made-up words, some more frequent than others: about so many tokens, or more."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(_WORDS)]
    weights = [1 / (place + 1) for place in range(_WORDS)]
    raw = folder / "made-up.jsonl"
    with raw.open("wb") as file:
        for _ in range(max(64, tokens // 200)):
            text = " ".join(rng.choices(words, weights, k=rng.randint(50, 350)))
            file.write(orjson.dumps({"text": text}) + b"\n")
    ingest(raw, folder / "made-up")
    return folder / "made-up"


def vocabulary_for(config: TrainingConfig) -> int:
    """Entries of a tokenizer trained here: no more than the model has embeddings for."""
    if config.model in MODELS:
        return config.vocab_size
    from penstock.train.models.huggingface import find_model, vocabulary

    return min(config.vocab_size, vocabulary(find_model(config.model, fresh_weights=True).config_json))


def _measured(world: int, steps: list[dict[str, Any]]) -> Measured:
    timed = steps[_WARM_UP:] or steps[-1:]
    taken = sum(step["step_s"] + step["wait_s"] for step in timed)
    shares = [step["mfu"] for step in timed if step["mfu"] is not None]
    return Measured(
        world=world,
        step_s=statistics.median(step["step_s"] + step["wait_s"] for step in timed),
        tokens_per_s=sum(step["num_tokens"] for step in timed) / max(1e-9, taken),
        mfu=statistics.median(shares) if shares else None,
        losses=[step["loss"] for step in steps],
    )

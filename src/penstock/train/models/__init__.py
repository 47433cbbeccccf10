"""Built-in models: what a run needs no download for.

    tiny, small    a decoder-only transformer that keeps documents apart
    counting       one parameter a sample; its weights say how often each sample was learned

A model gives the sum of its losses over a batch and the weight to divide by, so that uneven batches weigh right.
"""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.train.models.base import Learner
from penstock.train.models.counting import CountingModel
from penstock.train.models.transformer import SHAPES, Transformer

__all__ = ["CountingModel", "Learner", "Transformer", "build_model"]


def build_model(name: str, *, vocab_size: int, total_samples: int) -> Learner:
    """Make a model by name, with random weights from torch's current seed."""
    if name == "counting":
        return CountingModel(total_samples)
    if name in SHAPES:
        return Transformer(SHAPES[name], vocab_size=vocab_size)
    raise ConfigError(f"model={name!r} is unknown: expected one of {', '.join([*SHAPES, 'counting'])}")

"""Models: built-in ones, for which nothing is downloaded, and those of `transformers`.

    tiny, small    a decoder-only transformer that keeps documents apart
    act            a recurrent one with a carry, which ponders each token as long as it needs
    counting       one parameter a sample; its weights say how often each sample was learned
    any other      a causal language model by folder, config.json or Hub id (`huggingface.py`, imported only for these)

A model gives the sum of its losses over a batch and the weight to divide by, so that uneven batches weigh right.
"""

from __future__ import annotations

from penstock.train.models.act import ActShape, RecurrentModel
from penstock.train.models.base import Learner
from penstock.train.models.carrying import CarryModel
from penstock.train.models.counting import CountingModel
from penstock.train.models.transformer import SHAPES, Transformer

__all__ = ["CarryModel", "CountingModel", "Learner", "RecurrentModel", "Transformer", "build_model"]


def build_model(
    name: str,
    *,
    vocab_size: int,
    total_samples: int,
    config_json: str = "",
    across_documents: bool = False,
    halt_max_steps: int = 1,
) -> Learner:
    """Make a model, with random weights from torch's current seed.

    Args:
        name: Of a built-in one; of no meaning with `config_json`.
        vocab_size: Entries of the tokenizer.
        total_samples: Of the data set.
        config_json: The config of a model of `transformers`.
        across_documents: Whether documents that share a sequence may see each other.
        halt_max_steps: How often a recurrent model may ponder.
    """
    if config_json:
        from penstock.train.models.huggingface import CausalLM

        return CausalLM(config_json, vocab_size=vocab_size, across_documents=across_documents)
    if name == "counting":
        return CountingModel(total_samples)
    if name == "act":
        return RecurrentModel(
            ActShape(), vocab_size=vocab_size, halt_max_steps=halt_max_steps, across_documents=across_documents
        )
    return Transformer(SHAPES[name], vocab_size=vocab_size, across_documents=across_documents)

"""Small decoders of every family that is streamed, batches for them, and the ordinary way to learn those."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.feed import IGNORED_LABEL, Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.models.huggingface import CausalLM
from penstock.train.schedule import Schedule
from penstock.train.streamed import StreamedTrainer

VOCABULARY = 61
"""A multiple of nothing."""
CPU = torch.device("cpu")
_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {
    **_TOKENS,
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES}
QWEN2: dict[str, Any] = {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, one layer": {**LLAMA, "num_hidden_layers": 1},
    "llama, rotations by length": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2, tied": QWEN2,
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
    "mistral, window": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 8},
    "gemma2, soft caps and windows": {
        "model_type": "gemma2",
        **SIZES,
        "head_dim": 8,
        "sliding_window": 5,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 1.0,
    },
    "gemma3, two rotations": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"model_type": "phi3", **SIZES},
    "gpt2": GPT2,
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 3},
    "qwen3_moe, some layers dense": {
        "model_type": "qwen3_moe",
        **SIZES,
        **_MOE,
        "head_dim": 8,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "granitemoe, which caches unless told": {"model_type": "granitemoe", **SIZES, "num_local_experts": 3},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "granite, scales": {
        "model_type": "granite",
        **SIZES,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    "cohere, scaled logits": {"model_type": "cohere", **SIZES, "logit_scale": 0.25},
    "gpt_neox": {"model_type": "gpt_neox", **SIZES},
    "opt, a mask of its own": {
        **_TOKENS,
        "model_type": "opt",
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
    },
    "falcon": {
        **_TOKENS,
        "model_type": "falcon",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
    },
    "smollm3": {"model_type": "smollm3", **SIZES},
    "starcoder2": {"model_type": "starcoder2", **SIZES, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}


def model(config: dict[str, Any], *, vocab_size: int = VOCABULARY, seed: int = 0) -> CausalLM:
    """With weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    made = CausalLM(json.dumps(config), vocab_size=vocab_size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return made


def batch(
    rows: Sequence[Sequence[int]], length: int = 12, *, vocabulary: int = VOCABULARY, seed: int = 0
) -> DeviceBatch:
    """Sequences by the lengths of their documents, filled up with padding; labels and positions as a feed's."""
    rng = np.random.default_rng(seed)
    shape = len(rows), length
    ids, documents = rng.integers(0, vocabulary, shape), np.full(shape, -1)
    for row, lengths in enumerate(rows):
        documents[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.ones(shape, np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = np.arange(length)
    labels = np.full(shape, IGNORED_LABEL)
    labels[:, :-1] = np.where(begins[:, 1:] | (documents[:, 1:] < 0), IGNORED_LABEL, ids[:, 1:])
    made = Batch(
        input_ids=ids,
        labels=labels,
        position_ids=places - np.maximum.accumulate(np.where(begins, places, 0), axis=1),
        document_ids=documents,
        sample_ids=np.zeros(0, np.int64),
        spans=np.zeros((0, 3), np.int64),
        start_offset=0,
        stop_offset=len(rows),
        samples_done=0,
    )
    return to_device(made, CPU)


def rows_of(whole: DeviceBatch, rows: slice) -> DeviceBatch:
    """Some sequences of a batch, as a batch; none at all, too."""
    source = whole.source
    arrays = {name: getattr(source, name)[rows] for name in ("input_ids", "labels", "position_ids", "document_ids")}
    part = Batch(
        **arrays, sample_ids=source.sample_ids, spans=source.spans, start_offset=0, stop_offset=0, samples_done=0
    )
    return to_device(part, CPU)


PACKED = [[5, 7], [3, 6], [12], [2]]
"""Documents that share a sequence, with and without padding, and some that have one to themselves."""
WHOLE = [[12], [12], [12]]


def schedule(rate: float = 1e-2) -> Schedule:
    return Schedule(learning_rate=rate, kind="constant", warmup_steps=0, total_steps=0, min_ratio=0.1)


def ordinary(learner: CausalLM, fed: DeviceBatch) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients as the whole model has them; parameters that get none are left out."""
    loss = learner.loss_sum(fed, slice(0, len(fed))) / max(1, fed.num_tokens)
    loss.backward()
    found = {name: p.grad for name, p in learner.network.named_parameters() if p.grad is not None}
    for parameter in learner.parameters():
        parameter.grad = None
    return float(loss.detach()), found


def streamed(trainer: StreamedTrainer, fed: DeviceBatch) -> tuple[float, dict[str, Tensor]]:
    """The same, as a streamed trainer of the world's only rank makes them."""
    result = trainer.step(fed, 1)
    own = trainer.streaming.gradients[0]
    return result.loss, {
        place.name: place.of(own.units[unit.index]).clone() for unit in trainer.units for place in unit.places
    }

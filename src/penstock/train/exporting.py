"""A run's model as a folder that `transformers` reads: config.json, model.safetensors, tokenizer.json.

A built-in transformer is a Llama by another spelling: same norms, same rotation, same gates. Its weights are renamed
and its joint projection is split; the logits are the same. The recurrent model is none that `transformers` knows: its
weights and shape are written as they are, and `load_exported_act` reads them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError
from penstock.ledger import Commit
from penstock.storage import LocalStorage, open_storage
from penstock.train.checkpoints import in_files
from penstock.train.config import MODELS, RunConfig
from penstock.train.folders import writable_folder
from penstock.train.models.act import ActShape, RecurrentModel
from penstock.train.models.transformer import FEED_FACTOR, SHAPES, Shape
from penstock.train.parts import MODEL_KEY, TOKENIZER_KEY, RunParts, embedded_ledger

_ACT_TYPE = "penstock_act"


def export_run(run_dir: str, dest: str, checkpoint_id: str = "") -> str:
    """Write the model of a run's commit to a folder; returns which commit that was.

    Args:
        run_dir: The run. One that is being trained is not disturbed.
        dest: The folder; files of these names in it are replaced.
        checkpoint_id: Which commit; the last one where not given.
    """
    storage = open_storage(run_dir)
    before = RunConfig.load(storage)
    if before is None:
        raise ConfigError(f"{run_dir} holds no run: it has no config.toml; name the folder of a run")
    if before.training.model == "counting":
        raise ConfigError("the counting model predicts nothing: there is no such model in transformers")
    folder = writable_folder(open_storage(dest), what="export folder", remedy="name another")
    parts = RunParts(storage, before.training.ledger or embedded_ledger(storage))
    commit = _commit(parts, checkpoint_id)
    state = parts.checkpoints.read(commit.checkpoint_id, commit.digest, only="model")
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    training = before.training
    write_model(
        folder,
        weights,
        model=training.model,
        config=None if training.model in MODELS else json.loads(storage.get(MODEL_KEY)),
        vocab_size=before.vocab_size,
        max_seq_len=training.max_seq_len,
        tokenizer=storage.get(TOKENIZER_KEY),
        end_of_text=parts.tokenizer.end_of_text,
        halt_max_steps=training.halt_max_steps,
        across_documents=training.attend_across_documents,
    )
    return commit.checkpoint_id


def write_model(
    dest: LocalStorage,
    weights: dict[str, Tensor],
    *,
    model: str,
    config: dict[str, Any] | None,
    vocab_size: int,
    max_seq_len: int,
    tokenizer: bytes,
    end_of_text: str,
    halt_max_steps: int = 1,
    across_documents: bool = False,
) -> None:
    """Write a model to a folder: a built-in one, or one of transformers with its config."""
    if config is not None:
        config = {**config, "vocab_size": max(config["vocab_size"], vocab_size)}
    elif model == "act":
        config = _as_act(vocab_size, halt_max_steps, across_documents)
    else:
        shape = SHAPES[model]
        config = _as_llama(shape, vocab_size, max_seq_len)
        weights = _renamed(weights, shape)
    _write(dest, config, weights, tokenizer, end_of_text)


def _commit(parts: RunParts, checkpoint_id: str) -> Commit:
    commits = parts.ledger.commits()
    if not commits:
        raise CheckpointError(f"{parts.storage.url} has no commit yet: there is nothing to export")
    if not checkpoint_id:
        return commits[-1]
    kept = set(parts.checkpoints.ids())
    wanted = checkpoint_id.zfill(8)
    for commit in commits:
        if commit.checkpoint_id == wanted and wanted in kept:
            return commit
    there = ", ".join(commit.checkpoint_id for commit in commits if commit.checkpoint_id in kept)
    raise CheckpointError(f"{parts.storage.url} has no checkpoint {checkpoint_id}: expected one of {there}")


def _write(
    dest: LocalStorage, config: dict[str, Any], weights: dict[str, Tensor], tokenizer: bytes, end_of_text: str
) -> None:
    files = in_files("model", weights)
    for name, tensors in files.items():
        dest.put(name, save(tensors, metadata={"format": "pt"}))
    if len(files) > 1:
        where = {tensor: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": sum(each.nbytes for each in weights.values())}, "weight_map": where}
        dest.put("model.safetensors.index.json", json.dumps(index, indent=2).encode())
    dest.put(TOKENIZER_KEY, tokenizer)
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_of_text}
    dest.put("tokenizer_config.json", json.dumps(told, indent=2).encode())
    dest.put("config.json", json.dumps(config, indent=2).encode())  # last: with it the folder is whole


def load_exported_act(folder: str) -> RecurrentModel:
    """The recurrent model that `export_run` wrote to a folder."""
    storage = open_storage(folder)
    told = json.loads(storage.get("config.json"))
    if told.get("model_type") != _ACT_TYPE:
        raise ConfigError(f"{folder} holds a {told.get('model_type')!r}, no recurrent model: load it with transformers")
    model = RecurrentModel(
        ActShape(**told["shape"]),
        vocab_size=told["vocab_size"],
        halt_max_steps=told["halt_max_steps"],
        across_documents=told["attend_across_documents"],
    )
    model.load_state_dict(load(storage.get("model.safetensors")))
    return model.eval()


def _as_act(vocab_size: int, halt_max_steps: int, across_documents: bool) -> dict[str, Any]:
    return {
        "model_type": _ACT_TYPE,
        "vocab_size": vocab_size,
        "shape": asdict(ActShape()),
        "halt_max_steps": halt_max_steps,
        "attend_across_documents": across_documents,
    }


def _as_llama(shape: Shape, vocab_size: int, max_seq_len: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": FEED_FACTOR * shape.dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": torch.finfo(torch.float32).eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": max(2048, max_seq_len),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def _renamed(weights: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    renamed = {"model.embed_tokens.weight": weights["embed.weight"], "model.norm.weight": weights["norm.weight"]}
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        projections = weights[f"{ours}qkv.weight"].chunk(3)
        for name, part in zip("qkv", projections, strict=True):
            renamed[f"{theirs}self_attn.{name}_proj.weight"] = part.contiguous()
        for here, there in (
            ("out", "self_attn.o_proj"),
            ("gate", "mlp.gate_proj"),
            ("up", "mlp.up_proj"),
            ("down", "mlp.down_proj"),
            ("attention_norm", "input_layernorm"),
            ("feed_norm", "post_attention_layernorm"),
        ):
            renamed[f"{theirs}{there}.weight"] = weights[f"{ours}{here}.weight"]
    return renamed

"""Models of `transformers` that learn sequences in chunks.

They call attention by a name in their config, so that it can be put in its place: the one here is given a chunk's
queries, keys and values and has the rest in memory. That a model's tokens meet nowhere else (no convolution over
tokens, no attention of its own making) is not believed but tried out, on a few tokens, against the model as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.train.long.attention import ChunkAttention
from penstock.train.long.documents import Documents
from penstock.train.long.kernels import OwnAttention
from penstock.train.long.memory import DeviceMemory
from penstock.train.models.huggingface import CausalLM

_NAME = "penstock_chunks"
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STRETCHED = {"dynamic", "longrope"}
"""Rotary embeddings whose angles depend on how long the sequence is, which no chunk but the last knows."""
_DROPPED = ("layerdrop", "decoder_layerdrop")
"""Chances of leaving a layer out: a chunk that has left it out has no keys there for the chunks that follow."""
_TRIED_TOKENS = 11
_TRIED_CHUNK = 4
_TRIED_WINDOW = 3
"""Of layers that have a window: so that a few tokens reach beyond it."""


class HuggingFaceChunks:
    """A model of `transformers`, given chunks to attend to."""

    def __init__(self, lm: nn.Module, *, apart: bool, positions: bool) -> None:
        """Take a model; nothing of it is changed but while it computes a chunk.

        Args:
            lm: The model.
            apart: Whether documents that share a sequence are kept apart.
            positions: Whether it is told positions.
        """
        _register()
        self._lm = lm
        self._base: nn.Module = lm.base_model  # pyright: ignore[reportAttributeAccessIssue]
        self._head: Callable[[Tensor], Tensor] = lm.get_output_embeddings()  # pyright: ignore
        self._positions = positions
        self._has_cache = "use_cache" in inspect.signature(self._base.forward).parameters
        text = lm.config.get_text_config()  # pyright: ignore
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._scale = _logit_scale(text)
        self.vocab_size = int(text.vocab_size)
        self.depth = int(text.num_hidden_layers)
        self.keeps_documents_apart = apart
        self.layers_seen: set[int] = set()
        """Those that attended to the last chunk."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: ChunkAttention) -> Tensor:
        options: dict[str, Any] = {"use_cache": False} if self._has_cache else {}
        if self._positions:
            options["position_ids"] = position_ids
        with self._attending(attention):
            return self._base(input_ids=input_ids, **options).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden) * self._scale if self._scale != 1 else self._head(hidden)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    @contextmanager
    def _attending(self, attention: ChunkAttention) -> Iterator[None]:
        """While inside, every layer of the model attends by `attention`.

        None computes itself a second time when going back: that would be outside, and a chunk is little to keep.
        """
        configs = _configs(self._lm)
        twice: list[Any] = [part for part in self._lm.modules() if getattr(part, "gradient_checkpointing", False)]
        before = [config._attn_implementation_internal for config in configs]
        self.layers_seen = set()
        outer = _current.set((attention, before[0] or "eager", self.layers_seen))
        for config in configs:
            config._attn_implementation_internal = _NAME
        for part in twice:
            part.gradient_checkpointing = False
        try:
            yield
        finally:
            _current.reset(outer)
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation_internal = name
            for part in twice:
                part.gradient_checkpointing = True


_current: ContextVar[tuple[ChunkAttention, str, set[int]] | None] = ContextVar("penstock_chunks", default=None)
"""What the layers of the model that computes right now, in this thread, attend by; the attention it would use itself;
and the layers that have attended."""


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it; the mask is made here, of documents and windows."""
    current = _current.get()
    assert current is not None, "a layer attends to chunks outside of any"
    attention, name, seen = current
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    if attention_mask is not None:  # transformers makes none for an attention that has registered no mask
        raise ConfigError("it makes a mask of its own, of which chunks know nothing")
    if layer in seen:
        raise ConfigError(f"layer {layer} attends more than once, and chunks remember one set of keys a layer")
    seen.add(layer)
    own = _own(module, name, {**options, "scaling": scaling, "dropout": dropout, "sliding_window": sliding_window})
    special = any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "head_mask"))
    attended = attention(
        layer,
        query,
        key,
        value,
        own,
        scaling=scaling,
        window=sliding_window,
        plain=name == "sdpa" and not special,
        dropout=dropout > 0,
    )
    return attended, None


def _own(module: nn.Module, name: str, options: dict[str, Any]) -> OwnAttention:
    """The attention that a layer would use, as a function of tensors alone."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name != "eager" and name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        chosen: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
    elif eager is not None:
        chosen, name = eager, "eager"
    else:
        raise ConfigError(f"{type(module).__name__} has no attention that can be called by itself")

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if name == "eager":  # adds it
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, lowest)
        return chosen(module, query, key, value, mask, **options)[0]

    return attend


def _configs(lm: nn.Module) -> list[Any]:
    """The configs that say by which attention a model attends: its own, and those of models within it."""
    found = {id(part.config): part.config for part in lm.modules() if hasattr(part, "config")}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def _logit_scale(text: Any) -> float:
    if (scale := getattr(text, "logit_scale", None)) is not None:
        return float(scale)
    return 1 / float(getattr(text, "logits_scaling", None) or 1)


def as_chunkable(model: CausalLM, longest: int | None = None) -> HuggingFaceChunks:
    """A model that was tried out and found to give in chunks what it gives as a whole; else refused."""
    refuse_unknown(model.lm.config, longest)  # pyright: ignore[reportArgumentType]
    made = HuggingFaceChunks(model.lm, apart=model.apart != "never", positions=model.takes_positions)
    _try(model, made)
    return made


def refuse_unknown(config: Any, longest: int | None) -> None:
    """Refuse a model whose config says that chunks would see something else than the whole sequence does."""
    text = config.get_text_config()
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if unknown:
        raise ConfigError(
            f"use_chunked_training: a {text.model_type} has layers of {', '.join(unknown)}, which hold no keys and "
            "values of every token: leave it away, or choose a model with full or sliding attention (--model)"
        )
    dropped = [name for name in _DROPPED if getattr(text, name, 0)]
    if dropped:
        raise ConfigError(
            f"use_chunked_training: a {text.model_type} leaves layers out at random ({dropped[0]}="
            f"{getattr(text, dropped[0])}), and later chunks would look there for keys of earlier ones: set "
            f"{dropped[0]} to 0 in its config.json, or leave it away"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    original = original or getattr(text, "max_position_embeddings", None)
    if kinds & _STRETCHED and (longest is None or original is None or longest > original):
        raise ConfigError(
            f"use_chunked_training: a {text.model_type} stretches its positions by the length of the sequence "
            f"({', '.join(sorted(kinds & _STRETCHED))}), which a chunk does not know: expected max_seq_len of at most "
            f"{original}, a model with other positions, or no chunks"
        )


def _kind(model: CausalLM) -> str:
    return str(model.lm.config.model_type)  # pyright: ignore


@torch.no_grad()
def _try(model: CausalLM, made: HuggingFaceChunks) -> None:
    """Compare a few tokens, in two documents, as a whole and in chunks."""
    device = next(model.lm.parameters()).device
    vocabulary: int = model.lm.get_input_embeddings().num_embeddings  # pyright: ignore
    cut = _TRIED_TOKENS // 2
    ids = torch.arange(1, _TRIED_TOKENS + 1, device=device)[None] * 7 % vocabulary
    positions = torch.cat([torch.arange(cut), torch.arange(_TRIED_TOKENS - cut)]).to(device)[None]
    documents = torch.arange(_TRIED_TOKENS, device=device)[None] >= cut
    if not made.keeps_documents_apart:
        positions = torch.arange(_TRIED_TOKENS, device=device)[None]
    was_training = model.lm.training
    model.lm.eval()
    try:
        with _narrow_windows(model.lm):
            whole = model(ids, positions, documents.long())
            parted = torch.cat(list(_in_chunks(made, ids, positions, documents.cpu().numpy())), 1)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        AssertionError,
        ConfigError,
    ) as error:
        raise ConfigError(_cannot(model, f"fails in chunks: {error}")) from error
    finally:
        model.lm.train(was_training)
    if not made.layers_seen:
        raise ConfigError(_cannot(model, "attends in a way of its own"))
    far = (whole - parted).abs().max() / whole.abs().max().clamp_min(1e-9)
    if not far < 1e-3:
        raise ConfigError(_cannot(model, f"gives other logits in chunks than as a whole (by {far:.1e})"))


@contextmanager
def _narrow_windows(lm: nn.Module) -> Iterator[None]:
    """While inside, layers with a window see a few tokens back alone, wherever the model keeps how many."""
    parts: list[Any] = [*lm.modules(), *_configs(lm)]
    narrowed = [(part, window) for part in parts if (window := _window(part)) is not None]
    try:
        for part, _ in narrowed:
            part.sliding_window = _TRIED_WINDOW
        yield
    finally:
        for part, window in narrowed:
            part.sliding_window = window


def _window(part: Any) -> int | None:
    window = getattr(part, "sliding_window", None)
    return window if isinstance(window, int) and not isinstance(window, bool) else None


def _cannot(model: CausalLM, why: str) -> str:
    return (
        f"use_chunked_training: a {_kind(model)} {why}: leave it away, or choose a model whose tokens meet in "
        "attention alone, such as Llama, Qwen, Mistral or GPT-2 (--model)"
    )


def _in_chunks(made: HuggingFaceChunks, ids: Tensor, positions: Tensor, document_ids: np.ndarray) -> Iterator[Tensor]:
    memory = DeviceMemory()
    memory.begin(*ids.shape)
    documents = Documents(document_ids, ids.device, apart=made.keeps_documents_apart)
    for start in range(0, _TRIED_TOKENS, _TRIED_CHUNK):
        stop = min(start + _TRIED_CHUNK, _TRIED_TOKENS)
        attention = ChunkAttention(memory=memory, documents=documents, start=start, stop=stop)
        yield made.logits(made.hidden(ids[:, start:stop], positions[:, start:stop], attention))

"""How large a model is, from its config alone: nothing is built that takes up memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.train.models.huggingface import config_of
from penstock.train.streamed.decoder import find_layers
from penstock.train.streamed.layout import Unit, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What planning has to know of a model."""

    units: list[Unit]
    """The edge first, then the layers; of parameters without memory."""
    parameters: int
    at_work: float
    """Parameters that a token meets: `parameters_at_work`."""
    width: int
    inner: int
    """Numbers a token has inside a layer's widest part."""
    vocab: int


def sizes_of(config_json: str, *, vocab_size: int, ranks: int) -> ModelSizes:
    """The sizes of a model whose units are shared by so many ranks a machine."""
    from transformers import AutoModelForCausalLM

    config = config_of(config_json)
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, vocab_size)
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # pyright: ignore
    layers = find_layers(lm)
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    edge = [(name, parameter) for name, parameter in lm.named_parameters() if id(parameter) not in of_layers]
    units = [lay_out(0, "edge", edge, ranks)]
    units += [lay_out(i + 1, f"layer {i}", layer.named_parameters(), ranks) for i, layer in enumerate(layers)]
    width = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * width)
    return ModelSizes(
        units=units,
        parameters=sum(parameter.numel() for parameter in lm.parameters()),
        at_work=parameters_at_work(lm),
        width=width,
        inner=inner * int(getattr(text, "num_experts_per_tok", None) or 1),
        vocab=int(text.vocab_size),
    )


def parameters_at_work(lm: nn.Module) -> float:
    """Parameters that a token is multiplied with: of experts those it is sent to, of embeddings the head's alone."""
    text: Any = lm.config.get_text_config()  # pyright: ignore
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    share = chosen / experts if experts and chosen else 1.0
    looked_up: Any = lm.get_input_embeddings().weight  # pyright: ignore
    head: Any = lm.get_output_embeddings()  # pyright: ignore
    apart = head is not None and head.weight is not looked_up
    total = 0.0
    for name, parameter in lm.named_parameters():
        if not (apart and parameter is looked_up):
            total += parameter.numel() * (share if ".experts." in name else 1.0)
    return total

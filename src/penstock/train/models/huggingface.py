"""Causal language models of Hugging Face's `transformers`: by local folder, by Hub id, or from a config alone.

    find ──► HubModel: its config as JSON, and where its weights are       once, when a run begins
    build ──► CausalLM: from the config, with fresh weights                in every process; a checkpoint has the rest

Only safetensors are loaded and no code that comes with a model is run. Documents that share a sequence are kept apart
by position ids that begin again at 0, of which `transformers` makes the mask (sliding windows included); a model that
does not is given a whole mask; one that takes neither lets them see each other, and that is told. It is tried out.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, MissingExtraError
from penstock.train.device_batch import DeviceBatch
from penstock.train.models.base import Learner
from penstock.train.models.transformer import summed_cross_entropy

_log = logging.getLogger(__name__)

Apart = Literal["positions", "mask", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model that was found: what it is, and whence its weights."""

    name: str
    config_json: str
    has_weights: bool
    """Whether it is begun with the weights it came with; else with fresh ones."""


def find_model(name: str, *, fresh_weights: bool) -> HubModel:
    """Look a model up: a folder, a config.json, or ``owner/name[@revision]`` of the Hub."""
    transformers = _transformers()
    path = Path(name).expanduser()
    where, revision = _address(name)
    try:
        config = transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
        known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model={name!r} cannot be had: {_first_line(error)}: expected tiny, small, act, a folder with "
            "config.json, a config.json, or a model of the Hub that needs no code of its own"
        ) from error
    if not known:
        raise ConfigError(f"model={name!r} is a {config.model_type!r}, which is no causal language model")
    only_config = path.is_file() or (path.is_dir() and not any(path.glob("*.safetensors")))
    if only_config and not fresh_weights and path.is_dir() and any(path.glob("*.bin")):
        raise ConfigError(
            f"{path} has weights as pickle alone, which could run code: convert them to safetensors, or --fresh-weights"
        )
    return HubModel(
        name=name, config_json=config.to_json_string(use_diff=False), has_weights=not (only_config or fresh_weights)
    )


def load_weights(found: HubModel) -> dict[str, Tensor]:
    """The weights a model came with, in fp32, by the names of its state."""
    transformers = _transformers()
    where, revision = _address(found.name)
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            where, revision=revision, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the weights of model={found.name!r} cannot be loaded: {_first_line(error)}") from error
    return loaded.state_dict()


def config_of(config_json: str) -> Any:
    """The config object of a model, from its JSON."""
    told = json.loads(config_json, object_hook=_special_float)
    return _transformers().AutoConfig.for_model(told.pop("model_type"), **told)


def _special_float(told: dict[str, Any]) -> Any:
    """Numbers that JSON has no way to write, as `transformers` writes them."""
    return float(told["__float__"]) if told.keys() == {"__float__"} else told


def largest_position(config_json: str) -> int | None:
    """How many tokens a sequence may have, where the model says so."""
    return getattr(config_of(config_json).get_text_config(), "max_position_embeddings", None)


def vocabulary(config_json: str) -> int:
    """How many tokens a model has embeddings for."""
    return int(config_of(config_json).get_text_config().vocab_size)


class CausalLM(Learner):
    """A `transformers` model as a learner. Its state has the model's own names."""

    def __init__(self, config_json: str, *, vocab_size: int, across_documents: bool = False) -> None:
        """Build a model with fresh weights, from torch's current seed.

        Args:
            config_json: Its config.
            vocab_size: Entries of the tokenizer; where the model has fewer, its embeddings are made as many.
            across_documents: Let documents of one sequence see each other; some kernels are faster so.
        """
        config = config_of(config_json)
        lm: nn.Module = _transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        resize: Callable[..., object] = lm.resize_token_embeddings  # pyright: ignore[reportAssignmentType]
        if vocab_size > config.get_text_config().vocab_size:
            resize(vocab_size)
        self._take(lm.train(), across_documents)

    @classmethod
    def around(cls, lm: nn.Module, *, across_documents: bool = False) -> CausalLM:
        """A model that is there already, in whatever mode it is; weights and gradients stay its own."""
        made = cls.__new__(cls)
        made._take(lm, across_documents)
        return made

    def _take(self, lm: nn.Module, across_documents: bool) -> None:
        super().__init__()
        self.lm = lm
        accepted = inspect.signature(self.lm.forward).parameters
        inner = inspect.signature(getattr(self.lm, "base_model", self.lm).forward).parameters
        caches = "use_cache" in accepted or ("kwargs" in accepted and "use_cache" in inner)
        self.options: dict[str, Any] = {"use_cache": False} if caches else {}
        """What the model is always called with."""
        self.takes_positions = "position_ids" in accepted
        self.apart: Apart = "never" if across_documents else self._find_way()
        """How documents that share a sequence are kept apart."""
        if self.apart == "never" and not across_documents:
            _log.warning(
                "documents of one sequence see each other: %s takes neither positions nor a mask for them",
                self.lm.config.model_type,  # pyright: ignore
            )

    @property
    def network(self) -> nn.Module:
        return self.lm

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Begin with these weights; embeddings that were made more keep fresh ones for what is new."""
        for name, own in self.lm.state_dict().items():
            given = weights.get(name)
            if given is None or given.shape[1:] != own.shape[1:] or len(given) > len(own):
                raise ConfigError(f"the model's weights do not fit its config: {name} is missing or has another shape")
            own[: len(given)].copy_(given) if given.ndim else own.copy_(given)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Logits ``(sequences, length, vocabulary)``."""
        return self._logits(self.apart, input_ids, position_ids, document_ids)

    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        logits = self(batch.input_ids[rows], batch.position_ids[rows], batch.document_ids[rows])
        return summed_cross_entropy(logits, batch.labels[rows])

    def _logits(self, apart: Apart, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        return self.lm(input_ids=input_ids, **self._options(apart, position_ids, document_ids)).logits

    def options_for(self, position_ids: Tensor, document_ids: Tensor) -> dict[str, Any]:
        """What the model is called with beside tokens, so that documents that share a sequence are kept apart."""
        return self._options(self.apart, position_ids, document_ids)

    def _options(self, apart: Apart, position_ids: Tensor, document_ids: Tensor) -> dict[str, Any]:
        options = dict(self.options)
        if apart != "never" and self.takes_positions:
            options["position_ids"] = position_ids
        if apart == "mask":
            options["attention_mask"] = self._mask(document_ids)
        return options

    def _mask(self, document_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """Who may see whom; by kind of layer where some have a window, which a whole mask would do away with."""
        seen = (document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]
        text = self.lm.config.get_text_config()  # pyright: ignore
        kinds: set[str] = set(getattr(text, "layer_types", None) or ())
        if "sliding_attention" not in kinds:
            return self._as_attention_takes_it(seen)
        places = torch.arange(seen.shape[-1], device=seen.device)
        near = places[:, None] - places < text.sliding_window  # pyright: ignore
        masks = {kind: seen & near if kind == "sliding_attention" else seen for kind in kinds}
        return {kind: self._as_attention_takes_it(mask) for kind, mask in masks.items()}

    def _as_attention_takes_it(self, seen: Tensor) -> Tensor:
        if self.lm.config._attn_implementation != "eager":  # pyright: ignore
            return seen
        dtype = next(self.lm.parameters()).dtype  # added to scores
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    @torch.no_grad()
    def _find_way(self) -> Apart:
        """Change one document and look whether another that shares its sequence, or an earlier token, notices."""
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
        documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
        device = next(self.lm.parameters()).device
        positions, documents = positions.to(device), documents.to(device)
        one = torch.arange(1, 7, device=device)[None] % self.lm.get_input_embeddings().num_embeddings  # pyright: ignore
        other = torch.where(documents == 0, one.flip(1), one)
        was_training = self.lm.training
        self.lm.eval()  # without dropout, which would look like a difference
        try:
            for apart in ("positions", "mask"):
                if apart == "positions" and not self.takes_positions:
                    continue
                try:
                    seen = [self._logits(apart, ids, positions, documents)[:, 3:] for ids in (one, other)]
                except (RuntimeError, ValueError, TypeError, AttributeError):  # a model that knows no such thing
                    continue
                if torch.allclose(seen[0], seen[1], atol=1e-5):
                    return apart
        finally:
            self.lm.train(was_training)
        return "never"


def _address(name: str) -> tuple[str, str | None]:
    """Where to load from, and at which revision; a path is never asked of the Hub."""
    path = Path(name).expanduser()
    if path.exists():
        return str(path), None
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise ConfigError(f"model={name!r} is not there: expected a folder with config.json, or a config.json")
    repository, _, revision = name.removeprefix("hf://").partition("@")
    return repository, revision or None


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models other than tiny, small, act and counting need transformers: "
            "install it with `pip install 'transformers>=5'`"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__

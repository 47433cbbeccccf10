"""A batch of long sequences: what it leaves unsaid is worked out, what does not fit together is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.feed import IGNORED_LABEL
from penstock.feed.torch_tensors import as_tensor

_OPTIONAL = ("labels", "position_ids", "document_ids", "attention_mask")
PADDING = -1
"""The document of tokens that are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTokens:
    """Sequences of tokens, all ``(sequences, length)``, on the device they came on."""

    input_ids: Tensor
    labels: Tensor
    """The next token of the same document, or `IGNORED_LABEL`."""
    position_ids: Tensor
    document_ids: Tensor
    """A number a document; `PADDING`, or another negative one, for padding."""

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def piece(self, start: int, stop: int, device: torch.device) -> LongTokens:
        """A copy of some tokens of each sequence, on a device: a graph that keeps it keeps no more than it."""
        names = ("input_ids", "labels", "position_ids", "document_ids")
        parts = {name: getattr(self, name)[:, start:stop] for name in names}
        return LongTokens(**{name: part.to(device, copy=True, non_blocking=True) for name, part in parts.items()})

    def label_counts(self, chunk_size: int) -> list[int]:
        """Places that have a label, of each piece."""
        counts = (self.labels != IGNORED_LABEL).sum(0)
        return [int(part) for part in torch.stack([part.sum() for part in counts.split(chunk_size)]).tolist()]


def long_tokens(batch: Mapping[str, Any]) -> LongTokens:
    """Make tensors of a batch.

    Args:
        batch: `input_ids`, ``(sequences, length)``; and, as there are, `labels` (the next token at each place, as the
            feed gives them), `position_ids`, `document_ids` (numbers of packed documents, negative for padding),
            `attention_mask` (0 for padding, on either side). Other keys are not looked at.

    What is not there is made: documents where positions do not go on, else one a sequence; positions from 0 in each
    document; labels of the next token, none behind a document's end or in padding.
    """
    given = {name: _tensor(name, batch[name]) for name in ("input_ids", *_OPTIONAL) if batch.get(name) is not None}
    input_ids = given.get("input_ids")
    if input_ids is None:
        raise ConfigError(f"the batch has no input_ids: got {', '.join(sorted(batch)) or 'nothing'}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ConfigError(f"input_ids are {_told(input_ids)}: expected (sequences, length), neither of them 0")
    for name, tensor in given.items():
        if tensor.shape != input_ids.shape:
            raise ConfigError(f"{name} are {_told(tensor)} and input_ids {_told(input_ids)}: expected the same")
        if tensor.device != input_ids.device:
            raise ConfigError(f"{name} are on {tensor.device}, input_ids on {input_ids.device}: expected one device")
    documents = _documents(given)
    return LongTokens(
        input_ids=input_ids,
        labels=_labels(given, documents),
        position_ids=given["position_ids"] if "position_ids" in given else _positions(documents),
        document_ids=documents,
    )


def _tensor(name: str, value: Any) -> Tensor:
    try:
        tensor = as_tensor(value) if hasattr(value, "shape") else torch.tensor(value)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise ConfigError(
            f"{name} cannot be a tensor: {error}: pad rows to one length, with an attention_mask"
        ) from error
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        raise ConfigError(f"{name} are no whole numbers: got {getattr(tensor, 'dtype', type(value).__name__)}")
    return tensor if name == "attention_mask" else tensor.to(torch.int64)


def _documents(given: dict[str, Tensor]) -> Tensor:
    input_ids, mask = given["input_ids"], given.get("attention_mask")
    documents = given.get("document_ids")
    if documents is None:
        documents = torch.zeros_like(input_ids)
        if "position_ids" in given:
            positions = given["position_ids"]
            documents[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).cumsum(1)
        elif mask is not None and bool(((mask != 0).long().diff(dim=1) > 0).sum(1).add(mask[:, 0] != 0).gt(1).any()):
            raise ConfigError(
                "attention_mask has padding between tokens of a sequence: expected it before or behind them; "
                "documents that share a sequence are told by document_ids or position_ids"
            )
    return documents if mask is None else documents.where(mask != 0, PADDING)


def _positions(documents: Tensor) -> Tensor:
    """Places counted from where each document begins."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(1).values


def _labels(given: dict[str, Tensor], documents: Tensor) -> Tensor:
    input_ids = given["input_ids"]
    following = torch.full_like(input_ids, IGNORED_LABEL)
    goes_on = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    following[:, :-1] = input_ids[:, 1:].where(goes_on, IGNORED_LABEL)
    labels = given.get("labels")
    if labels is None:
        return following
    labels = labels.where(documents >= 0, IGNORED_LABEL)
    learned, comparable = labels != IGNORED_LABEL, following != IGNORED_LABEL
    copies = learned.any() & (labels == input_ids).logical_or(~learned).all()
    if bool(copies & (learned & comparable & (labels != following)).any()):
        raise ConfigError(
            "labels are the input tokens themselves, which would teach copying: give the token that follows each, "
            "or leave labels away and they are made"
        )
    return labels


def _told(tensor: Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "a single number"

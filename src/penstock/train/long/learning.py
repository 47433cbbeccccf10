"""Learning in chunks of tokens, as a trainer asks for it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.train.device_batch import DeviceBatch
from penstock.train.long.chunkable import chunkable
from penstock.train.long.exact import ExactChunks, rows_of
from penstock.train.long.rollout import Rollout, chunked_segment_rollout
from penstock.train.models import Learner, RecurrentModel
from penstock.train.trainer import Computing, InChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    """How sequences are cut."""

    chunk_size: int = 2_048
    """Tokens a chunk."""
    bptt_chunks: int | Literal["all"] = 1
    """Chunks that the gradients of a model with a carry go back through; all others always do."""
    cpu_offload: bool = False
    """Keep what waits for its chunk in host memory."""


def learning_in_chunks(model: Learner, settings: ChunkSettings, longest: int) -> InChunks:
    """The way in which a model learns long sequences; refused where it has none.

    Args:
        model: On the device it will compute on, or not yet.
        settings: How sequences are cut.
        longest: Tokens of the longest sequence there will be.
    """
    if isinstance(model, RecurrentModel):
        return CarriedChunks(model, settings)
    return ExactChunks(chunkable(model, longest), settings.chunk_size, cpu_offload=settings.cpu_offload)


class CarriedChunks:
    """Learns by rollout of a model with a carry."""

    def __init__(self, model: RecurrentModel, settings: ChunkSettings) -> None:
        self._model = model
        self._settings = settings

    def learn(self, batch: DeviceBatch, rows: slice, weight: float, computing: Computing) -> Tensor:
        return self._rolled_out(batch, rows, weight, computing).loss_sum / weight

    @torch.no_grad()
    def loss_sum(self, batch: DeviceBatch, rows: slice) -> Tensor:
        return self._rolled_out(batch, rows, 1.0, nullcontext).loss_sum

    def _rolled_out(self, batch: DeviceBatch, rows: slice, weight: float, computing: Computing) -> Rollout:
        tokens, _ = rows_of(batch, rows)
        return chunked_segment_rollout(
            self._model,
            tokens,
            self._model.halt_max_steps,
            self._settings.chunk_size,
            bptt_chunks=self._settings.bptt_chunks,
            cpu_offload=self._settings.cpu_offload,
            weight=weight,
            computing=computing,
        )

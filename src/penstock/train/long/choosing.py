"""``chunk_size="auto"``: the largest chunk that was tried and fits in the memory there is.

Larger chunks are faster, by less and less; what one costs is measured, by learning two chunks of made-up tokens on the
device itself. What grows with the sequence (keys, values, their gradients) is measured too and added for its whole
length; so is the optimizer's state, which is not there yet. A CPU is not measured: there it is by the advice alone.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.feed import IGNORED_LABEL, Batch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.train.long.learning import ChunkSettings, learning_in_chunks
from penstock.train.models import Learner
from penstock.train.trainer import Computing

_log = logging.getLogger(__name__)

_GB = 10**9
_ADVICE = ((22 * _GB, 4_096), (16 * _GB, 2_048), (0, 1_024))
"""By a device's memory: with 24 GB and more, with 20 GB, with 10 GB."""
_TRIED = (8_192, 4_096, 2_048, 1_024, 512, 256)
_SHARE = 0.92
"""Of the memory that is free: what is let go is not always free in one piece."""
_MORE_CHUNKS = 6
"""Of a second trial, beyond two: what it takes more is what grows with the sequence."""
_OPTIMIZER_BYTES = 8
"""A parameter: two moments in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a chunk size is tried with."""

    model: Learner
    """On the device."""
    length: int
    """Tokens a sequence."""
    sequences: int
    """How many are learned at a time."""
    vocab_size: int
    computing: Computing
    settings: ChunkSettings


def advised_chunk_size(memory_bytes: int) -> int:
    """Tokens a chunk for a device with so much memory."""
    return next(size for least, size in _ADVICE if memory_bytes >= least)


def choose_chunk_size(trial: Trial, device: torch.device, host_bytes: int) -> int:
    """The largest chunk size that fits, up to where larger ones are hardly faster."""
    if device.type != "cuda":
        return min(advised_chunk_size(host_bytes), trial.length)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    needs: list[str] = []
    for size in _TRIED:
        if size > trial.length and size != _TRIED[-1]:
            continue
        needed = _needed_bytes(trial, min(size, trial.length), device)
        if needed is not None and needed <= _SHARE * free:
            _log.info("chunk_size=%d: %.1f GiB of the %.1f GiB that are free", size, needed / 2**30, free / 2**30)
            return min(size, trial.length)
        needs.append(f"{size} does not fit" if needed is None else f"{size} needs {needed / 2**30:.1f} GiB")
    lighter = "" if trial.settings.cpu_offload else "--cpu-offload, "
    raise ConfigError(
        f"no chunk_size fits in the {free / 2**30:.1f} GiB that are free on {device}: {', '.join(needs)}: try "
        f"{lighter}more --gradient-accumulation-steps, a shorter --max-seq-len or a smaller model"
    )


def _needed_bytes(trial: Trial, size: int, device: torch.device) -> int | None:
    """The most memory that learning a whole sequence in chunks of some size takes; None where a trial does not fit."""
    parameters = sum(parameter.numel() for parameter in trial.model.parameters())
    try:
        peaks = [_peak_bytes(trial, size, chunks, device) for chunks in (2, 2 + _MORE_CHUNKS)]
    except torch.OutOfMemoryError:
        return None
    finally:
        trial.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
    growth = max(0, peaks[1] - peaks[0]) / _MORE_CHUNKS
    chunks = -(-trial.length // size)
    return int(peaks[0] + growth * max(0, chunks - 2)) + _OPTIMIZER_BYTES * parameters


def _peak_bytes(trial: Trial, size: int, chunks: int, device: torch.device) -> int:
    """Beyond what is taken before the gradients are."""
    learning = learning_in_chunks(trial.model, replace(trial.settings, chunk_size=size), trial.length)
    batch = _made_up(trial, min(trial.length, size * chunks), device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    learning.learn(batch, slice(None), 1.0, trial.computing)
    torch.cuda.synchronize(device)
    trial.model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(device) - before


def _made_up(trial: Trial, length: int, device: torch.device) -> DeviceBatch:
    shape = trial.sequences, length
    places = np.arange(trial.sequences * length).reshape(shape)
    labels = (places + 1) % trial.vocab_size
    labels[:, -1] = IGNORED_LABEL
    batch = Batch(
        input_ids=places % trial.vocab_size,
        labels=labels,
        position_ids=places % length,
        document_ids=np.zeros(shape, np.int64),
        sample_ids=np.zeros(0, np.int64),
        spans=np.zeros((0, 3), np.int64),
        start_offset=0,
        stop_offset=trial.sequences,
        samples_done=0,
    )
    return to_device(batch, device)

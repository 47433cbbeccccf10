"""Checkpoints of a run in their bucket: the weights after so many windows, for whoever comes late."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from penstock.errors import ArtifactRejected, ExchangeError, ObjectNotFound, PreconditionFailed
from penstock.exchange.artifacts import LONG_HEADER_BYTES, largest, pieces, unpack
from penstock.exchange.keys import VERSION, Keys, window_in
from penstock.exchange.layout import Layout, digest_of
from penstock.exchange.places import read_limited
from penstock.faults import reach
from penstock.storage import Storage

_log = logging.getLogger(__name__)
_LARGEST_BYTES = 1 << 20
"""Of what names a checkpoint's file."""
_REMEDY = "the run's owner removes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights after so many windows."""

    learned: int
    base: str
    """Digest of the last window's manifest: what the next one builds on."""
    weights: Tensor


def checkpoints_of(storage: Storage, keys: Keys) -> list[int]:
    """All checkpoints of a run, by the windows they have learned, the oldest first."""
    names = (info.key.removeprefix(keys.checkpoints) for info in storage.list(keys.checkpoints))
    numbers = (window_in(name.removesuffix(".json")) for name in names if name.endswith(".json"))
    return sorted(number for number in numbers if number is not None)


class Checkpoints:
    """Writes and reads them: each weight by its name, as any reader of safetensors reads it, then a JSON that names the
    file. A checkpoint is there once its JSON is."""

    def __init__(self, storage: Storage, keys: Keys, layout: Layout) -> None:
        self._storage = storage
        self._keys = keys
        self._layout = layout
        self._shapes = {name: ("F32", shape) for name, shape in layout}

    def write(self, storage: Storage, checkpoint: Checkpoint) -> bool:
        """Publish a checkpoint; False where that was done before."""
        if storage.exists(self._keys.checkpoint(checkpoint.learned)):
            return False
        weights = digest_of(checkpoint.weights)
        header = {
            "kind": "checkpoint",
            "version": VERSION,
            "run": self._keys.run,
            "learned": checkpoint.learned,
            "weights": weights,
        }
        digest, parts = pieces(header, self._split(checkpoint.weights))
        key = self._keys.weights(checkpoint.learned, digest)
        with storage.writer(key) as writer:  # in parts, where it is large
            for part in parts:
                writer.write(bytes(part))
        reach("exchange.before_checkpoint", key)
        told = {**header, "base": checkpoint.base, "file": key, "digest": digest}
        try:
            storage.put_if_absent(self._keys.checkpoint(checkpoint.learned), orjson.dumps(told))
        except PreconditionFailed:
            return False
        return True

    def numbers(self) -> list[int]:
        """All checkpoints there are, by the windows they have learned, the oldest first."""
        return checkpoints_of(self._storage, self._keys)

    def read(self, learned: int) -> Checkpoint:
        """A checkpoint, refusing every byte that is not what was published."""
        key = self._keys.checkpoint(learned)
        try:
            told: dict[str, Any] = orjson.loads(read_limited(self._storage, key, _LARGEST_BYTES))
            if (told["run"], told["learned"]) != (self._keys.run, learned) or not isinstance(told["base"], str):
                raise ExchangeError(f"checkpoint {key} tells of another run or window: {_REMEDY}")
            if told["file"] != self._keys.weights(learned, told["digest"]):
                raise ExchangeError(f"checkpoint {key} names a file that is not its own: {_REMEDY}")
            data = read_limited(self._storage, told["file"], largest(self._shapes, LONG_HEADER_BYTES))
            artifact = unpack(data, self._shapes, LONG_HEADER_BYTES)
            if artifact.digest != told["digest"]:
                raise ExchangeError(f"checkpoint {key} and its file tell of different things: {_REMEDY}")
            base = told["base"]
        except (ArtifactRejected, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ExchangeError(f"checkpoint {key} is damaged: {error}: {_REMEDY}") from error
        flat = [artifact.tensors[name].reshape(-1) for name, _ in self._layout]
        weights = torch.from_numpy(np.concatenate(flat))
        if digest_of(weights) != told["weights"]:
            raise ExchangeError(f"checkpoint {key} holds other weights than it says: {_REMEDY}")
        return Checkpoint(learned=learned, base=base, weights=weights)

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is sound: behind an older one there are all aggregates, so it leads as far.

        One that is damaged is told in the log; one that is removed while it is read is not the newest."""
        tried: set[int] = set()
        damaged: ExchangeError | None = None
        while left := [number for number in self.numbers() if number not in tried]:
            tried.add(left[-1])
            try:
                return self.read(left[-1])
            except ObjectNotFound as error:
                _log.info("checkpoint %d is gone: %s", left[-1], error)
            except ExchangeError as error:
                _log.warning("%s; trying the one before it", error)
                damaged = damaged or error
        raise damaged or ExchangeError(
            f"there is no checkpoint of run {self._keys.run!r} to begin with: is its aggregator running?"
        )

    def remove(self, storage: Storage, learned: int) -> None:
        """Remove a checkpoint, what names it first."""
        prefix = self._keys.checkpoint(learned).removesuffix(".json")
        storage.delete(f"{prefix}.json")
        for info in list(storage.list(f"{prefix}-")):
            storage.delete(info.key)

    def _split(self, weights: Tensor) -> dict[str, np.ndarray]:
        parts: dict[str, np.ndarray] = {}
        at = 0
        for name, shape in self._layout:
            size = int(np.prod(shape, dtype=np.int64))
            parts[name] = weights[at : at + size].numpy().reshape(shape)
            at += size
        return parts

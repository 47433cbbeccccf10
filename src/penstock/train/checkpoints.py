"""Checkpoints on storage: tensors first, then a manifest that seals them, so that part of one is never taken for one.

checkpoints/<step>/model.safetensors, optimizer.safetensors, checkpoint.json
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load, save

from penstock.errors import CheckpointError, ObjectNotFound
from penstock.storage import Storage
from penstock.train.trainer import State

PREFIX = "checkpoints/"
_SEAL = "checkpoint.json"
_VERSION = 1


class Checkpoints:
    """Writes, reads, verifies and removes the checkpoints of one run."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def write(self, checkpoint_id: str, state: State, about: dict[str, Any]) -> str:
        """Write a checkpoint, durable when this returns.

        Returns:
            The digest a commit binds: of the manifest, which holds the digest of every file.
        """
        files = {}
        for name, tensors in _split(state).items():
            data = save(tensors)
            self._storage.put(_key(checkpoint_id, name), data)
            files[name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        seal = orjson.dumps({"version": _VERSION, "checkpoint_id": checkpoint_id, **about, "files": files})
        self._storage.put(_key(checkpoint_id, _SEAL), seal)
        return hashlib.sha256(seal).hexdigest()

    def read(self, checkpoint_id: str, digest: str) -> State:
        """Read a checkpoint, refusing every byte that is not what was committed."""
        try:
            seal = self._storage.get(_key(checkpoint_id, _SEAL))
            if hashlib.sha256(seal).hexdigest() != digest:
                raise CheckpointError(
                    f"checkpoint {checkpoint_id} is not the one that was committed: its manifest differs"
                )
            described = orjson.loads(seal)
            if described["version"] != _VERSION:
                raise CheckpointError(
                    f"checkpoint {checkpoint_id} has version {described['version']}, expected {_VERSION}"
                )
            state: State = {}
            for name, facts in described["files"].items():
                data = self._storage.get(_key(checkpoint_id, name))
                if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                    raise CheckpointError(f"checkpoint {checkpoint_id}: {name} is damaged: its sha256 differs")
                state.update(load(data))
        except ObjectNotFound as error:
            raise CheckpointError(f"checkpoint {checkpoint_id} is incomplete: {error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"checkpoint {checkpoint_id} cannot be read: {error}") from error
        return state

    def ids(self) -> list[str]:
        """All checkpoints there are files of, whole or not, in order."""
        names = {info.key.removeprefix(PREFIX).split("/")[0] for info in self._storage.list(PREFIX)}
        return sorted(name for name in names if name.isdecimal())

    def remove_all_but(self, keep: set[str]) -> None:
        """Remove the others, the seal first, so that a crash leaves no checkpoint that looks whole."""
        for checkpoint_id in self.ids():
            if checkpoint_id not in keep:
                self._storage.delete(_key(checkpoint_id, _SEAL))
                for info in list(self._storage.list(f"{PREFIX}{checkpoint_id}/")):
                    self._storage.delete(info.key)


def _split(state: State) -> dict[str, State]:
    """Weights by themselves, for whoever wants only those; the rest beside them."""
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    rest = {name: tensor for name, tensor in state.items() if name not in weights}
    return {"model.safetensors": weights, "optimizer.safetensors": rest}


def _key(checkpoint_id: str, name: str) -> str:
    return f"{PREFIX}{checkpoint_id}/{name}"

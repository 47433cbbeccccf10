"""Checkpoints on storage: tensors first, then a manifest that seals them, so that part of one is never taken for one.

checkpoints/<step>/model.safetensors, optimizer.safetensors, checkpoint.json

What is larger than a file may be is several: model-00001-of-00003.safetensors and so on. One of them at a time is in
memory, so a state that fills the machine can still be committed, and taken up again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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
FILE_BYTES = 1 << 30
"""Of tensors a file, at most; a larger tensor has one to itself. Writing and reading take up a few times that."""


class Checkpoints:
    """Writes, reads, verifies and removes the checkpoints of one run."""

    def __init__(self, storage: Storage, *, file_bytes: int = FILE_BYTES) -> None:
        self._storage = storage
        self._file_bytes = file_bytes

    def write(self, checkpoint_id: str, state: State, about: dict[str, Any]) -> str:
        """Write a checkpoint, durable when this returns.

        Returns:
            The digest a commit binds: of the manifest, which holds the digest of every file.
        """
        files = {}
        for name, tensors in _split(state, self._file_bytes).items():
            data = save(tensors)
            self._storage.put(_key(checkpoint_id, name), data)
            files[name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            del data  # before the next one is made
        seal = orjson.dumps({"version": _VERSION, "checkpoint_id": checkpoint_id, **about, "files": files})
        self._storage.put(_key(checkpoint_id, _SEAL), seal)
        return hashlib.sha256(seal).hexdigest()

    def read(self, checkpoint_id: str, digest: str, *, only: str = "") -> State:
        """Read a checkpoint, refusing every byte that is not what was committed.

        Args:
            checkpoint_id: Which one.
            digest: What its commit has bound.
            only: How files begin that are wanted, ``model`` for weights alone.
        """
        state: State = {}
        for part in self.parts(checkpoint_id, digest, only=only):
            state.update(part)
        return state

    def parts(self, checkpoint_id: str, digest: str, *, only: str = "") -> Iterator[State]:
        """The same, file by file: each is held only while it is looked at."""
        for name, data in self._files(checkpoint_id, digest, only):
            try:
                part = load(data)
            except SafetensorError as error:
                raise CheckpointError(f"checkpoint {checkpoint_id}: {name} cannot be read: {error}") from error
            del data  # the next one is read only when this one is used up
            yield part
            del part

    def verify(self, checkpoint_id: str, digest: str) -> None:
        """Refuse a checkpoint that is not what was committed."""
        for _, data in self._files(checkpoint_id, digest, ""):
            del data

    def _files(self, checkpoint_id: str, digest: str, only: str) -> Iterator[tuple[str, bytes]]:
        """Name and bytes of every file, checked."""
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
            for name, facts in described["files"].items():
                if name.startswith(only):
                    yield name, self._checked(checkpoint_id, name, facts["sha256"])
        except ObjectNotFound as error:
            raise CheckpointError(f"checkpoint {checkpoint_id} is incomplete: {error}") from error

    def _checked(self, checkpoint_id: str, name: str, sha256: str) -> bytes:
        data = self._storage.get(_key(checkpoint_id, name))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CheckpointError(f"checkpoint {checkpoint_id}: {name} is damaged: its sha256 differs")
        return data

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


def _split(state: State, file_bytes: int) -> dict[str, State]:
    """Weights by themselves, for whoever wants only those; the rest beside them; each in as many files as it takes."""
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    rest = {name: tensor for name, tensor in state.items() if name not in weights}
    return in_files("model", weights, file_bytes) | in_files("optimizer", rest, file_bytes)


def in_files(stem: str, tensors: State, file_bytes: int = FILE_BYTES) -> dict[str, State]:
    """Tensors by the files they go to, in their order, named as `transformers` names parts of a model."""
    files: list[State] = [{}]
    room = file_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and files[-1]:
            files.append({})
            room = file_bytes
        files[-1][name] = tensor
        room -= tensor.nbytes
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    return {f"{stem}-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, 1)}


def _key(checkpoint_id: str, name: str) -> str:
    return f"{PREFIX}{checkpoint_id}/{name}"

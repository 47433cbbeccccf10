"""Tokenizers of the Hub: the few small files of a model that make one, at one commit, kept in the cache.

    owner/name[@revision] ──► commit ──► penstock's cache, Hugging Face's cache, the Hub ──► files

A commit that is in a cache costs no request; a branch costs one, to learn its commit. With HF_HUB_OFFLINE, or where the
Hub cannot be reached, a branch is what it was when it was looked at last; the latter is told.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.blocks import cache_folder
from penstock.errors import (
    AccessDenied,
    ConfigError,
    MissingExtraError,
    ObjectNotFound,
    StorageError,
    TransientStoreError,
)
from penstock.feed.tokenizer_files import CONFIG, TokenizerFiles, find_definition
from penstock.feed.tokenizer_name import HubName
from penstock.storage import HubStorage, LocalStorage, is_offline, open_hub_repository

_log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_BYTES = 512 << 20
"""More than any tokenizer has: whatever claims it is no tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFiles:
    """What a cache has of a repository at a commit."""

    storage: LocalStorage
    name: str
    commit: str

    @property
    def where(self) -> str:
        return f"hf://{self.name}@{self.commit}"

    @property
    def names(self) -> frozenset[str]:
        prefix = self._key("")
        return frozenset(
            info.key.removeprefix(prefix)
            for info in self.storage.list(prefix)
            if "/" not in info.key.removeprefix(prefix)
        )

    def read(self, name: str) -> bytes:
        return self.storage.get(self._key(name))

    def keep(self, name: str, data: bytes) -> None:
        _keep(self.storage, self._key(name), data)

    def _key(self, name: str) -> str:
        return f"{_folder(self.name)}/snapshots/{self.commit}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """A repository's files, each taken from a cache that has it, else fetched and kept."""

    repository: HubStorage
    kept: KeptFiles
    others: KeptFiles
    """Hugging Face's own cache: read, never written."""
    _read: dict[str, bytes] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return self.repository.url

    @property
    def names(self) -> frozenset[str]:
        return frozenset(key for key in self.repository.files if "/" not in key)

    def read(self, name: str) -> bytes:
        if name not in self._read:
            self._read[name] = self._find(name)
        return self._read[name]

    def _find(self, name: str) -> bytes:
        size_bytes = self.repository.head(name).size_bytes
        if size_bytes > _LARGEST_BYTES:
            raise ConfigError(
                f"{self.where}/{name} has {size_bytes} bytes, expected a tokenizer's (up to {_LARGEST_BYTES}): "
                "name another model, or a local copy"
            )
        for cached in (self.kept, self.others):
            if name in cached.names:
                data = cached.read(name)
                break
        else:
            data = self.repository.get(name)
        self.kept.keep(name, data)
        return data


def open_hub_tokenizer(hub_name: HubName) -> TokenizerFiles:
    """The files of a model's tokenizer, at the commit that its revision stands for now."""
    own = LocalStorage((cache_folder() / "tokenizers").expanduser().absolute())
    others = LocalStorage(_hugging_face_cache())
    if hub_name.revision and _COMMIT.fullmatch(hub_name.revision):
        found = _complete(own, others, hub_name.name, hub_name.revision)
        if found is not None:
            return found
    try:
        offline = is_offline()
    except MissingExtraError:
        found = _as_seen_last(own, others, hub_name)
        if found is None:
            raise
        _log.warning("%s: taking the copy in the cache, of %s: huggingface_hub is not installed", hub_name, found.where)
        return found
    if offline:
        return _without_asking(own, others, hub_name)
    try:
        repository = open_hub_repository(hub_name.name, hub_name.revision, kind="models")
    except TransientStoreError as error:
        found = _as_seen_last(own, others, hub_name)
        if found is None:
            raise
        _log.warning("%s: taking the copy in the cache, of %s: %s", hub_name, found.where, error)
        return found
    _log.info("tokenizer %s is %s", hub_name, repository.url)
    _keep(own, _reference(hub_name), repository.commit.encode())
    found = _complete(own, others, hub_name.name, repository.commit)
    if found is not None:
        return found
    return HubFiles(
        repository=repository,
        kept=KeptFiles(storage=own, name=hub_name.name, commit=repository.commit),
        others=KeptFiles(storage=others, name=hub_name.name, commit=repository.commit),
    )


def refused(spec: str, error: StorageError) -> StorageError:
    """What the Hub refused, with what else was tried; of the same kind."""
    looked = "" if spec.startswith("hf://") else f"there is no file or folder of this name in {Path.cwd()}, and "
    told = f"tokenizer {spec!r}: {looked}as a model of the Hub it is not to be had: {error}"
    kind = next((kind for kind in (AccessDenied, ObjectNotFound) if isinstance(error, kind)), StorageError)
    return kind(told)


def _without_asking(own: LocalStorage, others: LocalStorage, hub_name: HubName) -> KeptFiles:
    found = _as_seen_last(own, others, hub_name)
    if found is None:
        raise StorageError(
            f"{hub_name}: HF_HUB_OFFLINE is set, and neither {own.url} nor {others.url} has its tokenizer: unset it "
            "once, or name a local copy"
        )
    if CONFIG not in found.names and found.storage.url == others.url:
        _log.warning(
            "%s: the cache has no %s, and HF_HUB_OFFLINE is set: what ends a document is guessed", found.where, CONFIG
        )
    return found


def _as_seen_last(own: LocalStorage, others: LocalStorage, hub_name: HubName) -> KeptFiles | None:
    """What the caches have of the commit that a revision stood for when it was looked at last."""
    key = _reference(hub_name)
    commits = [storage.get(key).decode().strip() for storage in (own, others) if storage.exists(key)]
    if hub_name.revision:
        commits.append(hub_name.revision)
    for commit in filter(_COMMIT.fullmatch, commits):
        for storage in (own, others):
            kept = KeptFiles(storage=storage, name=hub_name.name, commit=commit)
            if _defines(kept):
                return kept
    return None


def _complete(own: LocalStorage, others: LocalStorage, name: str, commit: str) -> KeptFiles | None:
    """A cache's copy that lacks nothing: ours, where the definition comes last, or another that has the settings."""
    kept = KeptFiles(storage=own, name=name, commit=commit)
    if _defines(kept):
        return kept
    kept = KeptFiles(storage=others, name=name, commit=commit)
    return kept if CONFIG in kept.names and _defines(kept) else None


def _defines(kept: KeptFiles) -> bool:
    try:
        find_definition(kept)
    except ConfigError:
        return False
    return True


def _keep(storage: LocalStorage, key: str, data: bytes) -> None:
    """Keep a copy for the next time; a cache that cannot be written to is told, and costs only that."""
    try:
        storage.put(key, data)
    except StorageError as error:
        _log.warning("%s is not kept, and will be fetched again: %s", key, error)


def _folder(name: str) -> str:
    return "models--" + name.replace("/", "--")


def _reference(hub_name: HubName) -> str:
    return f"{_folder(hub_name.name)}/refs/{hub_name.revision or 'main'}"


def _hugging_face_cache() -> Path:
    """Where huggingface_hub keeps repositories, by the variables it goes by."""
    if chosen := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("HF_HOME")
    beside = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return (Path(home) if home else beside).expanduser().absolute() / "hub"

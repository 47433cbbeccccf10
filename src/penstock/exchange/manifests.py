"""Manifests: what each window came to, in a chain. The only thing that feeds the outer step."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import orjson

from penstock.errors import ArtifactRejected, ExchangeError, ObjectNotFound, PreconditionFailed
from penstock.exchange.keys import VERSION, Keys, window_in
from penstock.exchange.places import read_limited, store_time
from penstock.storage import Storage

_LARGEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A contribution that is in the aggregate."""

    uid: str
    digest: str
    """Of the artifact."""
    object_version: str | None
    """What the store calls these bytes."""
    size_bytes: int
    norm: float
    samples_digest: str
    """Of the sample ids it says to have read."""
    written_at: float
    """By the store's clock."""
    is_reserve: bool = False
    """Whether it filled in for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A contribution that was not used, and why."""

    uid: str
    window: int
    """That it was for: a late one is told of a window later."""
    reason: str
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A window, as it was closed."""

    run: str
    window: int
    base: str
    """Digest of the manifest before it; of the first, of run.json."""
    contributions: tuple[Accepted, ...]
    """In the order in which they were added up."""
    rejected: tuple[Rejected, ...]
    missing: tuple[str, ...]
    """Peers of whom nothing came."""
    aggregate: dict[str, Any]
    """Key, size_bytes and digest of the change."""
    weights: str
    """Digest of all weights once it was applied."""
    opened_at: float
    closed_at: float
    """By the store's clock."""
    extensions: int = 0
    """How often the window's time was over before enough had come."""
    scores_window: int | None = None
    """Of which window the peer list was."""
    version: str = VERSION
    digest: str = field(default="", compare=False)
    """Of its bytes in the store; known once it was read or written."""

    def as_bytes(self) -> bytes:
        told = asdict(self)
        del told["digest"]
        return orjson.dumps(told, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, where: str) -> Manifest:
        try:
            told = orjson.loads(data)
            if told["version"] != VERSION:
                raise ExchangeError(f"{where} has version {told['version']!r}, expected {VERSION!r}: update penstock")
            known = {each.name for each in fields(cls)}
            told = {name: value for name, value in told.items() if name in known}
            told["contributions"] = tuple(Accepted(**each) for each in told["contributions"])
            told["rejected"] = tuple(Rejected(**each) for each in told["rejected"])
            told["missing"] = tuple(told["missing"])
            _check_types(told)
            return cls(**{**told, "digest": digest_of(data)})
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ExchangeError(f"{where} is damaged: {error}: nobody can go on behind it") from error


def _check_types(told: dict[str, Any]) -> None:
    """Refuse what would be used as something else than it is."""
    numbers = [told["opened_at"], told["closed_at"], told["aggregate"]["size_bytes"]]
    numbers += [number for each in told["contributions"] for number in (each.norm, each.size_bytes)]
    texts = [told["base"], told["weights"], told["aggregate"]["key"], told["aggregate"]["digest"], *told["missing"]]
    texts += [each.uid for each in (*told["contributions"], *told["rejected"])]
    texts += [text for each in told["rejected"] for text in (each.reason, each.told)]
    if not all(isinstance(each, int | float) for each in numbers) or not all(isinstance(each, str) for each in texts):
        raise TypeError("numbers or texts that are none")


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class ManifestChain:
    """Manifests of a run in its bucket. Each names the one before it, so that a chain cannot be mended unseen."""

    def __init__(self, storage: Storage, keys: Keys) -> None:
        self._storage = storage
        self._keys = keys

    def read(self, window: int) -> Manifest | None:
        """A window's manifest; None where it is not closed yet, or too old."""
        key = self._keys.manifest(window)
        try:
            data = read_limited(self._storage, key, _LARGEST_BYTES)
        except ObjectNotFound:
            return None
        except ArtifactRejected as error:
            raise ExchangeError(f"{key} is damaged: {error}: nobody can go on behind it") from error
        found = Manifest.from_bytes(data, key)
        if (found.run, found.window) != (self._keys.run, window):
            raise ExchangeError(f"{key} is the manifest of {found.run}, window {found.window}: nobody can use it")
        return found

    def aggregate_of(self, manifest: Manifest) -> str:
        """Where a window's change lies: nowhere else than where it belongs."""
        key = self._keys.aggregate(manifest.window, manifest.aggregate["digest"])
        if manifest.aggregate["key"] != key:
            told = "names an aggregate that is not its own"
            raise ExchangeError(f"{self._keys.manifest(manifest.window)} {told}: nobody can use it")
        return key

    def exists(self, window: int) -> bool:
        return self._storage.exists(self._keys.manifest(window))

    def written_at(self, window: int) -> float:
        """When a window was closed, and with that the next one opened: by the store's clock."""
        key = self._keys.manifest(window)
        try:
            return store_time(self._storage.head(key))
        except ObjectNotFound as error:
            told = f"{key} is gone: nobody can say when window {window + 1} opened"
            raise ExchangeError(f"{told}: restore it, or begin another run") from error

    def publish(self, storage: Storage, manifest: Manifest) -> Manifest:
        """Close a window. Where another has closed it, that is what counts, and it is given back."""
        data = manifest.as_bytes()
        try:
            storage.put_if_absent(self._keys.manifest(manifest.window), data)
        except PreconditionFailed:
            found = self.read(manifest.window)
            if found is None:
                raise ExchangeError(f"{self._keys.manifest(manifest.window)} was there and is gone again") from None
            return found
        return Manifest.from_bytes(data, self._keys.manifest(manifest.window))

    def count(self) -> int:
        """How many windows were closed so far: by a list, since old manifests may be gone."""
        prefix = self._keys.manifest(0).removesuffix("00000000.json")
        names = (info.key.removeprefix(prefix) for info in self._storage.list(prefix))
        numbers = (window_in(name.removesuffix(".json")) for name in names if name.endswith(".json"))
        return max((number for number in numbers if number is not None), default=-1) + 1

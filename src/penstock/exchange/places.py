"""The four buckets of a run, as a role may use them: each with the credentials for what it does there, no others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from penstock.errors import ArtifactRejected, ConfigError, StorageError
from penstock.storage import LocalStorage, ObjectInfo, Storage, load_bucket_secrets
from penstock.storage.objects import ObjectStorage
from penstock.storage.retry import Budgets, RetryBudget

Role = Literal["aggregator", "miner", "validator", "export", "status"]
_Purpose = Literal["read", "write"]
_USES: dict[Role, dict[str, _Purpose]] = {
    "aggregator": {"gradients": "write", "aggregator": "write", "checkpoints": "write"},
    "miner": {"gradients": "write", "aggregator": "read", "checkpoints": "read"},
    "validator": {"gradients": "read", "aggregator": "write", "checkpoints": "read"},
    "export": {"aggregator": "read", "checkpoints": "read"},
    "status": {"aggregator": "read"},
}
"""Which credentials a role has to have. The keys to write also read there: the aggregator's reads all contributions."""
PATIENCE_S = 3_600.0
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The buckets; those that a role has no use for are None."""

    role: Role
    gradients: Storage | None
    aggregator: Storage
    checkpoints: Storage | None
    folder: Path | None = None
    """Where they are, where they are folders."""

    def dataset(self, subfolder: str) -> Any:
        """What `R2DatasetLoader` takes as `dataset`; the bucket's read credentials are enough."""
        from penstock.pages import R2DatasetLoader

        if self.folder is not None:
            return str(self.folder / "dataset" / subfolder)
        prefix = subfolder or R2DatasetLoader.DATASET_SUBFOLDER
        budgets = patient(PATIENCE_S)
        bucket = load_bucket_secrets()["dataset"]
        if "multiple" in bucket:
            return bucket.storage("read", prefix=prefix, r2_region=R2DatasetLoader.CF_REGION_NAME)
        return bucket.storage("read", prefix=prefix, r2_region=R2DatasetLoader.CF_REGION_NAME, budgets=budgets)


def open_places(role: Role, folder: str | None = None, *, patience_s: float = PATIENCE_S) -> Places:
    """The buckets of the environment (`load_bucket_secrets`), or four folders in one. Does no I/O.

    Args:
        role: Who asks: what is missing in the environment for this role is told at once, by name.
        folder: A folder instead of buckets, with ``gradients``, ``aggregator``, ``checkpoints`` and ``dataset`` in it:
            for trying things out on one machine.
        patience_s: How long a store may be gone before that is an error.
    """
    uses = _USES[role]
    if folder is not None:
        top = Path(folder)
        found: dict[str, Any] = {name: LocalStorage(top / name) for name in uses}
        return _places(role, found, top)
    secrets = load_bucket_secrets()
    needs: dict[str, tuple[_Purpose, ...]] = {name: (purpose,) for name, purpose in uses.items()}
    if role not in ("export", "status"):
        needs["dataset"] = ("read",)
    secrets.check(needs)
    budgets = patient(patience_s)
    return _places(role, {name: secrets[name].storage(use, budgets=budgets) for name, use in uses.items()}, None)


def _places(role: Role, found: dict[str, Any], folder: Path | None) -> Places:
    for name, storage in found.items():
        if not isinstance(storage, LocalStorage | ObjectStorage):
            raise ConfigError(f"there are several {name} buckets: an exchange has one; only data sets may have more")
    return Places(
        role=role,
        gradients=found.get("gradients"),
        aggregator=found["aggregator"],
        checkpoints=found.get("checkpoints"),
        folder=folder,
    )


def patient(patience_s: float) -> Budgets:
    """Budgets of a worker that runs until it is stopped: a store that is gone for a while is waited for."""
    budget = RetryBudget(attempts=1_000_000, deadline_s=patience_s, longest_wait_s=_LONGEST_WAIT_S)
    return Budgets(metadata=budget, data=budget, writes=budget)


def read_limited(storage: Storage, key: str, limit: int) -> memoryview:
    """An object, if it is no larger than allowed: the answer tells that before a byte is taken."""
    return storage.get_if(key, lambda info: refuse_larger(info, limit))[0]


def refuse_larger(info: ObjectInfo, limit: int) -> None:
    if info.size_bytes > limit:
        raise ArtifactRejected("oversized", f"{info.size_bytes:,} bytes: expected at most {limit:,}")


def store_time(info: ObjectInfo) -> float:
    """When an object was written, by the store's own clock: seconds since 1970."""
    told = info.modified or ""
    try:
        if "T" in told:
            return datetime.fromisoformat(told).timestamp()
        return int(told.partition("-")[0]) / 1e9  # a folder: its file system's clock
    except ValueError:
        raise StorageError(f"the store does not say when {info.key} was written: got {told!r}") from None


def needed(storage: Storage | None) -> Storage:
    """A bucket that this role was opened with."""
    assert storage is not None
    return cast(Storage, storage)

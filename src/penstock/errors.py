"""Every error Penstock raises on purpose.

    PenstockError                  catch this one to catch them all; the CLI prints it and exits 1
    ├── ConfigError                a setting that cannot work, or that differs from the run it resumes
    ├── MissingExtraError          an optional part is not installed; names the pip command
    ├── SourceError                a source that cannot be read or understood
    │   ├── BadRowError            one row of it; names file, row and reason
    │   └── PageError              a page of a Parquet data set that cannot be read; names it
    ├── BlockStoreError            a folder that is not, or not yet, a block store
    │   └── CorruptBlockError      stored bytes differ from what was written
    ├── StorageError               bytes could not be read or written
    │   ├── ObjectNotFound
    │   ├── AccessDenied
    │   ├── PreconditionFailed     a conditional put found an object in its place
    │   ├── StorageBusy            another process holds the exclusive lock
    │   ├── StorageFull
    │   └── TransientStoreError    worth another try (only `storage` retries)
    ├── LedgerError                the ledger cannot be opened or refuses what was asked
    │   ├── LedgerMismatch         it belongs to other data, another chunk size or another version
    │   └── LeaseLost              the holder was fenced: its work since the last commit is void
    ├── CheckpointError            a checkpoint is missing or differs from what was committed
    ├── ExchangeError              an exchange cannot go on: what was published contradicts itself or is gone
    │   └── ArtifactRejected       what a peer sent is not used; says why
    └── TrainError                 training cannot go on: no worker left, a loss that is not a number
        └── RankLost               another rank of the job has failed, ended or fallen silent

Messages say what was wrong, what was got, what was expected and what to do about it.
"""


class PenstockError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PenstockError):
    """A setting that cannot work."""


class MissingExtraError(PenstockError):
    """An optional part is not installed."""


class SourceError(PenstockError):
    """A source that cannot be read or understood."""


class BadRowError(SourceError):
    """One row of a source is unusable and the policy is to stop."""


class PageError(SourceError):
    """A page of a Parquet data set cannot be read."""


class BlockStoreError(PenstockError):
    """A folder that is not, or not yet, a block store."""


class CorruptBlockError(BlockStoreError):
    """Stored bytes differ from what was written."""


class StorageError(PenstockError):
    """Bytes could not be read or written."""


class ObjectNotFound(StorageError):
    """No object has this key."""


class AccessDenied(StorageError):
    """The store refused: permissions or credentials."""


class PreconditionFailed(StorageError):
    """A conditional put found an object in its place."""


class StorageBusy(StorageError):
    """Another process holds the exclusive lock."""


class StorageFull(StorageError):
    """No space left for what was to be written."""


class TransientStoreError(StorageError):
    """A failure worth another try."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """How long the server asked to wait, where it did."""


class LedgerError(PenstockError):
    """The ledger cannot be opened or refuses what was asked."""


class LedgerMismatch(LedgerError):
    """The ledger belongs to other data, another chunk size or another version."""


class LeaseLost(LedgerError):
    """The holder was fenced; what it trained since the last commit is void."""


class CheckpointError(PenstockError):
    """A checkpoint is missing or differs from what was committed."""


class ExchangeError(PenstockError):
    """An exchange cannot go on: what was published contradicts itself or is gone."""


class ArtifactRejected(ExchangeError):
    """What a peer sent is not used."""

    def __init__(self, reason: str, told: str) -> None:
        super().__init__(f"{reason}: {told}")
        self.reason = reason
        """One word for it, to count by."""
        self.told = told


class TrainError(PenstockError):
    """Training cannot go on; what was committed is kept."""


class RankLost(TrainError):
    """Another rank of the job has failed, ended or fallen silent."""


def differences(got: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Name each field in which two identities differ, one sentence each."""
    keys = sorted(got.keys() | expected.keys())
    return [
        f"{key}: got {got.get(key)!r}, expected {expected.get(key)!r}"
        for key in keys
        if got.get(key) != expected.get(key)
    ]

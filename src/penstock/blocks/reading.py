"""How samples come out of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.blocks.index import check_index, read_samples
from penstock.blocks.manifest import BlockEntry
from penstock.storage import LocalStorage, Storage

if TYPE_CHECKING:
    from penstock.storage.disk_cache import DiskCache


class SampleBytes(Protocol):
    """Stored bytes of samples ``[start, stop)`` of a block, checked by CRC. Safe for threads."""

    def read(self, entry: BlockEntry, start: int, stop: int) -> bytes: ...


class LocalBytes:
    """A range of the index and a range of the block; once a block a look at whether its index is the right one."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: set[int] = set()

    def read(self, entry: BlockEntry, start: int, stop: int) -> bytes:
        if entry.block_id not in self._known:
            check_index(self._storage, entry)
            self._known.add(entry.block_id)
        return read_samples(self._storage, entry.file, entry.index_file, start, stop)


def bytes_of(storage: Storage, blocks: Sequence[BlockEntry], cache: DiskCache | None) -> SampleBytes:
    """The way to the bytes of a store."""
    if isinstance(storage, LocalStorage):
        return LocalBytes(storage)
    from penstock.blocks.remote import RemoteBytes
    from penstock.storage import ObjectStorage

    return RemoteBytes(storage, blocks, cache) if isinstance(storage, ObjectStorage) else LocalBytes(storage)

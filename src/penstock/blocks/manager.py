"""BlockManager: the face of a block store that training looks at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.blocks.manifest import Manifest
from penstock.blocks.store import BlockStore
from penstock.errors import BlockStoreError, ConfigError
from penstock.types import BlockFacts, DatasetIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block's metadata; its samples stay on disk."""

    block_id: int
    sample_count: int
    start_index: int
    """Id of its first sample."""
    is_last_block: bool
    checksum: str

    def chunk_count(self, chunk_size: int) -> int:
        """How many chunks of `chunk_size` samples it has; the last may be short."""
        _check_chunk_size(chunk_size)
        return -(-self.sample_count // chunk_size)


class BlockManager:
    """Chunks of a block store, by number.

    Constructing does no I/O; the store is opened on first use. Safe for threads, and pickles to spawned processes. A
    chunk is read, checked and parsed alone: the cost does not depend on where in its block it lies.
    """

    def __init__(
        self,
        dataset_path: str | os.PathLike[str],
        samples_per_block: int = 100_000,
        dataset_chunk_size: int = 4_000,
    ) -> None:
        """Remember where the data set is.

        Args:
            dataset_path: A block store.
            samples_per_block: What a block would hold if it were made here; a block store brings its own.
            dataset_chunk_size: Samples a chunk where a call does not say.
        """
        _check_chunk_size(dataset_chunk_size)
        if samples_per_block < 1:
            raise ConfigError(f"samples_per_block={samples_per_block} cannot hold a sample: expected 1 or more")
        self.dataset_path = os.fspath(dataset_path)
        self.samples_per_block = samples_per_block
        self.dataset_chunk_size = dataset_chunk_size
        self._opened: BlockStore | None = None

    def __enter__(self) -> BlockManager:
        _ = self._store
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = None

    @property
    def manifest(self) -> Manifest:
        return self._store.manifest

    def identity(self) -> DatasetIdentity:
        """What a ledger or a saved state of this data set is bound to."""
        header = self.manifest.header
        return DatasetIdentity(
            dataset_id=header.dataset_id, block_size=header.block_size, chunk_size=self.dataset_chunk_size
        )

    def get_block(self, block_id: int) -> Block:
        """A block's metadata; reads no samples."""
        entry = self._store.block(block_id)
        return Block(
            block_id=block_id,
            sample_count=entry.sample_count,
            start_index=entry.start_index,
            is_last_block=self.is_last_block(block_id),
            checksum=entry.checksum,
        )

    def facts(self, block_id: int) -> BlockFacts | None:
        """What the ledger has to know of a block, or None where there is no such block."""
        if not 0 <= block_id < len(self.manifest.blocks):
            return None
        entry = self.manifest.blocks[block_id]
        return BlockFacts(sample_count=entry.sample_count, checksum=entry.checksum)

    def get_total_blocks(self) -> int | None:
        """How many blocks there are; None while more may come."""
        return len(self.manifest.blocks) if self.manifest.complete else None

    def is_last_block(self, block_id: int) -> bool:
        """Whether the source ended with this block."""
        return self.manifest.complete and 0 <= block_id == len(self.manifest.blocks) - 1

    def get_rows(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> list[dict[str, Any]]:
        """The whole rows of one chunk."""
        start, stop = self._bounds(block_id, chunk_id, chunk_size)
        return [orjson.loads(line) for line in self._store.lines(block_id, start, stop)]

    def get_chunk(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> list[str]:
        """The texts of one chunk."""
        column = self.manifest.header.text_column
        if column is None:
            raise BlockStoreError(
                f"{self.dataset_path} was ingested without a text column: read it with get_rows, or ingest it again "
                "with --text-column"
            )
        return [row[column] for row in self.get_rows(block_id, chunk_id, chunk_size)]

    def _bounds(self, block_id: int, chunk_id: int, chunk_size: int | None) -> tuple[int, int]:
        size = self.dataset_chunk_size if chunk_size is None else chunk_size
        _check_chunk_size(size)
        samples = self._store.block(block_id).sample_count
        start = chunk_id * size
        if chunk_id < 0 or start >= samples:
            chunks = -(-samples // size)
            raise BlockStoreError(
                f"block {block_id} has no chunk {chunk_id}: its chunks of {size} are 0 to {chunks - 1}"
            )
        return start, min(start + size, samples)

    @property
    def _store(self) -> BlockStore:
        if self._opened is None:
            self._opened = BlockStore.open(self.dataset_path)
        return self._opened


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ConfigError(f"chunk size {chunk_size} cannot hold a sample: expected 1 or more")

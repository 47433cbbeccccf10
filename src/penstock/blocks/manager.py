"""BlockManager: the face of a block store that training looks at."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

from penstock.blocks.cache import ChunkCache
from penstock.blocks.manifest import BlockEntry, Manifest
from penstock.blocks.store import BlockStore, parse_lines
from penstock.errors import BlockStoreError, ConfigError
from penstock.sources import text_of
from penstock.types import BlockFacts, DatasetIdentity

_CACHED_CHUNKS = 10
_GUESSED_SAMPLE_BYTES = 4096.0


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
    chunk is read, checked and parsed alone: the cost does not depend on where in its block it lies. The last chunks
    stay in memory within `cache_bytes`, and the chunk behind the one asked for is read ahead in the background.
    A store that is still being ingested can be read as it grows.
    """

    def __init__(
        self,
        dataset_path: str | os.PathLike[str],
        samples_per_block: int = 100_000,
        dataset_chunk_size: int = 4_000,
        *,
        cache_bytes: int | None = None,
        prefetch: bool = True,
    ) -> None:
        """Remember where the data set is.

        Args:
            dataset_path: A block store.
            samples_per_block: What a block would hold if it were made here; a block store brings its own.
            dataset_chunk_size: Samples a chunk where a call does not say.
            cache_bytes: How much of the chunks' stored bytes stays in memory; room for about ten where not given.
            prefetch: Whether the next chunk is read ahead.
        """
        _check_chunk_size(dataset_chunk_size)
        if samples_per_block < 1:
            raise ConfigError(f"samples_per_block={samples_per_block} cannot hold a sample: expected 1 or more")
        if cache_bytes is not None and cache_bytes < 0:
            raise ConfigError(f"cache_bytes={cache_bytes} is no size: expected 0 or more")
        self.dataset_path = os.fspath(dataset_path)
        self.samples_per_block = samples_per_block
        self.dataset_chunk_size = dataset_chunk_size
        self.cache_bytes = cache_bytes
        self.prefetch = prefetch
        self._lock = threading.Lock()
        self._opened: tuple[BlockStore, ChunkCache] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (
            self.dataset_path,
            self.samples_per_block,
            self.dataset_chunk_size,
            self.cache_bytes,
            self.prefetch,
        )

    def __enter__(self) -> BlockManager:
        _ = self._store
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was read; used again, it opens again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()

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
        entry = self._entry(block_id)
        return Block(
            block_id=block_id,
            sample_count=entry.sample_count,
            start_index=entry.start_index,
            is_last_block=self.is_last_block(block_id),
            checksum=entry.checksum,
        )

    def facts(self, block_id: int) -> BlockFacts | None:
        """What the ledger has to know of a block, or None where there is no such block (yet)."""
        if block_id >= len(self.manifest.blocks):
            self._store.refresh()
        if not 0 <= block_id < len(self.manifest.blocks):
            return None
        entry = self.manifest.blocks[block_id]
        return BlockFacts(sample_count=entry.sample_count, checksum=entry.checksum)

    def get_total_blocks(self) -> int | None:
        """How many blocks there are; None while more may come."""
        self._store.refresh()
        manifest = self.manifest
        return len(manifest.blocks) if manifest.complete else None

    def is_last_block(self, block_id: int) -> bool:
        """Whether the source ended with this block."""
        return block_id >= 0 and self.get_total_blocks() == block_id + 1

    def get_rows(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> list[dict[str, Any]]:
        """The whole rows of one chunk."""
        size = self.dataset_chunk_size if chunk_size is None else chunk_size
        start, stop = self._bounds(block_id, chunk_id, size)
        store, cache = self._open()
        data = cache.get((block_id, start, stop), lambda: store.samples(block_id, start, stop))
        if self.prefetch:
            self._prefetch_behind(block_id, stop, size)
        return parse_lines(data, store.block(block_id), start, stop)

    def get_chunk(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> list[str]:
        """The texts of one chunk."""
        column = self.manifest.header.text_column
        if column is None:
            raise BlockStoreError(
                f"{self.dataset_path} was ingested without a text column: read it with get_rows, or ingest it again "
                "with --text-column"
            )
        rows = self.get_rows(block_id, chunk_id, chunk_size)
        return [text if type(text := row.get(column)) is str else text_of(row, column) for row in rows]

    def _entry(self, block_id: int) -> BlockEntry:
        if block_id >= len(self.manifest.blocks):
            self._store.refresh()
        return self._store.block(block_id)

    def _bounds(self, block_id: int, chunk_id: int, size: int) -> tuple[int, int]:
        _check_chunk_size(size)
        samples = self._entry(block_id).sample_count
        start = chunk_id * size
        if chunk_id < 0 or start >= samples:
            chunks = -(-samples // size)
            raise BlockStoreError(
                f"block {block_id} has no chunk {chunk_id}: its chunks of {size} are 0 to {chunks - 1}"
            )
        return start, min(start + size, samples)

    def _prefetch_behind(self, block_id: int, start: int, size: int) -> None:
        """Read ahead what follows in the block, or the next block's first chunk."""
        store, cache = self._open()
        blocks = store.manifest.blocks
        if start >= blocks[block_id].sample_count:
            block_id, start = block_id + 1, 0
        if block_id < len(blocks):
            stop = min(start + size, blocks[block_id].sample_count)
            cache.prefetch((block_id, start, stop), lambda: store.samples(block_id, start, stop))

    @property
    def _store(self) -> BlockStore:
        return self._open()[0]

    def _open(self) -> tuple[BlockStore, ChunkCache]:
        with self._lock:
            if self._opened is None:
                store = BlockStore.open(self.dataset_path)
                capacity = self._room_for_ten(store) if self.cache_bytes is None else self.cache_bytes
                self._opened = store, ChunkCache(capacity)
            return self._opened

    def _room_for_ten(self, store: BlockStore) -> int:
        """Ten chunks of the densest block."""
        weights = (block.size_bytes / max(1, block.sample_count) for block in store.manifest.blocks)
        return int(_CACHED_CHUNKS * self.dataset_chunk_size * max(weights, default=_GUESSED_SAMPLE_BYTES))


def _rebuild(path: str, per_block: int, chunk_size: int, cache_bytes: int | None, prefetch: bool) -> BlockManager:
    return BlockManager(path, per_block, chunk_size, cache_bytes=cache_bytes, prefetch=prefetch)


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ConfigError(f"chunk size {chunk_size} cannot hold a sample: expected 1 or more")

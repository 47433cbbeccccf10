"""BlockManager: the face of a block store that training looks at."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blocks.cache import ChunkCache
from penstock.blocks.manifest import BlockEntry, Manifest
from penstock.blocks.places import disk_cache_for, is_block_store
from penstock.blocks.store import BlockStore, finished_manifest, parse_lines
from penstock.errors import BlockStoreError, ConfigError, CorruptBlockError
from penstock.storage import LocalStorage
from penstock.types import BlockFacts, DatasetIdentity

if TYPE_CHECKING:  # what makes blocks is imported where it is needed: reading them starts quickly
    from penstock.blocks.background import BackgroundIngest
    from penstock.blocks.raw import RawDataset
    from penstock.blocks.request import OnBadRow

_CACHED_CHUNKS = 10
_GUESSED_SAMPLE_BYTES = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block's metadata; its samples stay on disk."""

    block_id: int
    sample_count: int
    start_index: int
    """Id of its first sample."""
    checksum: str
    manager: BlockManager = field(repr=False, compare=False)

    @property
    def is_last_block(self) -> bool:
        """Whether the source ended with this block; see `BlockManager.is_last_block`."""
        return self.manager.is_last_block(self.block_id)

    def chunk_count(self, chunk_size: int) -> int:
        """How many chunks of `chunk_size` samples it has; the last may be short."""
        _check_chunk_size(chunk_size)
        return -(-self.sample_count // chunk_size)


@dataclass(frozen=True, slots=True)
class _Opened:
    store: BlockStore
    cache: ChunkCache
    background: BackgroundIngest | None
    pid: int


class BlockManager:
    """Chunks of a data set, by number.

    Constructing does no I/O; the data set is opened on first use. Safe for threads, and pickles to spawned processes. A
    chunk is read, checked and parsed alone: the cost does not depend on where in its block it lies. The last chunks
    stay in memory within `cache_bytes`, and the chunk behind the one asked for is read ahead in the background.
    A store that is still being ingested can be read as it grows.

    A remote store is read by ranges, one request a chunk, and what was read stays in a disk cache that the processes of
    a machine share (`storage/disk_cache.py`). Credentials come from the environment and are neither kept nor pickled.

    A raw file, a folder, a glob or ``hf://...`` becomes a block store in the cache folder (PENSTOCK_CACHE, else
    ``~/.cache/penstock``), in the background: a block that has not landed yet is waited for, and an error of the source
    is raised by whoever waits. Several processes share one such store; one of them writes it.
    """

    def __init__(
        self,
        dataset_path: str | os.PathLike[str],
        samples_per_block: int = 100_000,
        dataset_chunk_size: int = 4_000,
        *,
        cache_bytes: int | None = None,
        disk_cache_bytes: int | None = None,
        prefetch: bool = True,
        wait_timeout_s: float = 1800.0,
        text_column: str | None = None,
        on_bad_row: OnBadRow = "stop",
        encoding: str | None = None,
    ) -> None:
        """Remember where the data set is.

        Args:
            dataset_path: A block store, here or on ``s3://bucket/prefix``; a raw file or folder, a glob,
                ``hf://name[:config[:split]]``, or files on ``s3://`` and ``https://``.
            samples_per_block: What a block of a raw data set holds; a block store brings its own.
            dataset_chunk_size: Samples a chunk where a call does not say.
            cache_bytes: How much of the chunks' stored bytes stays in memory; room for about ten where not given.
            disk_cache_bytes: How much of remote stores stays on this machine's disk, in the cache folder, shared by its
                processes; PENSTOCK_DISK_CACHE_BYTES, else 16 GiB, where not given; 0 for nothing.
            prefetch: Whether the next chunk is read ahead.
            wait_timeout_s: How long to wait for a block of a raw data set while nothing moves.
            text_column: Of a raw data set; found by name where not given.
            on_bad_row: What to do with a raw data set's bad rows: ``stop`` or ``skip``.
            encoding: Of a raw data set's text files; UTF-8 where not given.
        """
        _check_chunk_size(dataset_chunk_size)
        if samples_per_block < 1:
            raise ConfigError(f"samples_per_block={samples_per_block} cannot hold a sample: expected 1 or more")
        for name, size in (("cache_bytes", cache_bytes), ("disk_cache_bytes", disk_cache_bytes)):
            if size is not None and size < 0:
                raise ConfigError(f"{name}={size} is no size: expected 0 or more")
        self.dataset_path = os.fspath(dataset_path)
        self.samples_per_block = samples_per_block
        self.dataset_chunk_size = dataset_chunk_size
        self.cache_bytes = cache_bytes
        self.disk_cache_bytes = disk_cache_bytes
        self.prefetch = prefetch
        self.wait_timeout_s = wait_timeout_s
        self._raw_options = {"text_column": text_column, "on_bad_row": on_bad_row, "encoding": encoding}
        self._lock = threading.Lock()
        self._raw: RawDataset | None = None
        self._opened: _Opened | None = None

    def __reduce__(self) -> tuple[object, ...]:
        names = ("cache_bytes", "disk_cache_bytes", "prefetch", "wait_timeout_s")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names} | self._raw_options
        # What a raw source turned out to be goes along: another process must not resolve it to a newer version.
        return _rebuild, (self.dataset_path, self.samples_per_block, self.dataset_chunk_size, chosen, self._raw)

    def __enter__(self) -> BlockManager:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was read, and end an ingest in the background; used again, it opens again and goes on."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.cache.close()
            if opened.background is not None:
                opened.background.stop()

    @property
    def store_path(self) -> Path | None:
        """The folder the blocks are in; None where they are not on this machine's disks."""
        storage = self._store.storage
        return storage.root if isinstance(storage, LocalStorage) else None

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
        """A block's metadata; reads no samples. Waits for a block of a raw data set that has not landed yet."""
        entry = self._entry(block_id)
        return Block(
            block_id=block_id,
            sample_count=entry.sample_count,
            start_index=entry.start_index,
            checksum=entry.checksum,
            manager=self,
        )

    def facts(self, block_id: int) -> BlockFacts | None:
        """What the ledger has to know of a block, or None where there is no such block (yet). Waits for nothing."""
        opened = self._open()
        if block_id >= len(opened.store.manifest.blocks):
            self._refresh(opened)
        blocks = opened.store.manifest.blocks
        if not 0 <= block_id < len(blocks):
            return None
        return BlockFacts(sample_count=blocks[block_id].sample_count, checksum=blocks[block_id].checksum)

    def wait_until_complete(self) -> None:
        """Wait until all blocks of a raw data set have landed; nothing for a block store, complete or not."""
        opened = self._open()
        if opened.background is None or opened.store.manifest.complete:
            return

        def is_complete() -> bool:
            opened.store.refresh()
            return opened.store.manifest.complete

        opened.background.wait_for(is_complete, timeout_s=self.wait_timeout_s, what="the rest")

    def get_total_blocks(self) -> int | None:
        """How many blocks there are; None while more may come."""
        opened = self._open()
        self._refresh(opened)
        manifest = opened.store.manifest
        return len(manifest.blocks) if manifest.complete else None

    def is_last_block(self, block_id: int) -> bool:
        """Whether the source ended with this block. Of a raw data set that is still read it is known when the next
        block lands, and waited for."""
        opened = self._open()
        if opened.background is not None and block_id >= 0:
            self._wait_for_block(opened, opened.background, block_id + 1)
        return block_id >= 0 and self.get_total_blocks() == block_id + 1

    def get_rows(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> list[dict[str, Any]]:
        """The whole rows of one chunk."""
        size = self.dataset_chunk_size if chunk_size is None else chunk_size
        start, stop = self._bounds(block_id, chunk_id, size)
        opened = self._open()
        store = opened.store
        data = opened.cache.get((block_id, start, stop), lambda: self._samples(store, block_id, start, stop))
        if self.prefetch:
            self._prefetch_behind(opened, block_id, stop, size)
        return parse_lines(data, store.block(block_id), start, stop)

    def get_chunk(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> list[str]:
        """The texts of one chunk."""
        self._text_column()
        return self.texts_of(self.get_rows(block_id, chunk_id, chunk_size))

    def read_range(self, block_id: int, start: int, stop: int) -> bytes:
        """The stored bytes of samples ``[start, stop)`` of a block, checked; kept nowhere."""
        return self._store.samples(block_id, start, stop)

    def parse_range(self, data: bytes, block_id: int, start: int, stop: int) -> list[dict[str, Any]]:
        """The rows of what `read_range` gave."""
        return parse_lines(data, self._store.block(block_id), start, stop)

    def texts_of(self, rows: list[dict[str, Any]]) -> list[str]:
        """The texts of rows of this data set."""
        from penstock.sources import text_of

        column = self._text_column()
        return [text if type(text := row.get(column)) is str else text_of(row, column) for row in rows]

    def _text_column(self) -> str:
        header = self.manifest.header
        if header.text_column is None:
            raise BlockStoreError(
                f"{self.dataset_path} has no text column: read it with get_rows"
                f"{' or get_tokens' if header.token_column else ''}, or ingest it with --text-column"
            )
        return header.text_column

    def get_tokens(self, block_id: int, chunk_id: int, chunk_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of one chunk of a data set that came tokenised, end to end, and the offsets of its samples."""
        column = self.manifest.header.token_column
        if column is None:
            raise BlockStoreError(f"{self.dataset_path} did not come tokenised: read its texts with get_chunk")
        return self.tokens_of(self.get_rows(block_id, chunk_id, chunk_size))

    def tokens_of(self, rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of rows of a data set that came tokenised, end to end, and the offsets of its samples."""
        column = self.manifest.header.token_column
        assert column is not None
        from penstock.sources import tokens_of

        samples = [tokens_of(row, column) for row in rows]
        offsets = np.zeros(len(samples) + 1, dtype=np.int64)
        np.cumsum([len(ids) for ids in samples], out=offsets[1:])
        return np.concatenate(samples), offsets

    def _entry(self, block_id: int) -> BlockEntry:
        opened = self._open()
        if block_id >= len(opened.store.manifest.blocks):
            self._refresh(opened)
            if opened.background is not None:
                self._wait_for_block(opened, opened.background, block_id)
        return opened.store.block(block_id)

    def _wait_for_block(self, opened: _Opened, background: BackgroundIngest, block_id: int) -> None:
        """Wait until a block has landed, or the source has ended without it."""

        def is_known() -> bool:
            opened.store.refresh()
            return len(opened.store.manifest.blocks) > block_id or opened.store.manifest.complete

        background.wait_for(is_known, timeout_s=self.wait_timeout_s, what=f"block {block_id}")

    @staticmethod
    def _refresh(opened: _Opened) -> None:
        opened.store.refresh()
        if opened.background is not None and not opened.store.manifest.complete:
            opened.background.check()  # else a source that failed would look like one that is slow

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

    def _prefetch_behind(self, opened: _Opened, block_id: int, start: int, size: int) -> None:
        """Read ahead what follows in the block, or the next block's first chunk."""
        store = opened.store
        blocks = store.manifest.blocks
        if start >= blocks[block_id].sample_count:
            block_id, start = block_id + 1, 0
        if block_id < len(blocks):
            stop = min(start + size, blocks[block_id].sample_count)
            opened.cache.prefetch((block_id, start, stop), lambda: self._samples(store, block_id, start, stop))

    def _samples(self, store: BlockStore, block_id: int, start: int, stop: int) -> bytes:
        try:
            return store.samples(block_id, start, stop)
        except CorruptBlockError as error:
            if self._raw is None:
                raise
            raise CorruptBlockError(
                f"{error}; it is in the cache, made from {self._raw.spec}: delete {self._raw.store_path}, and it is "
                "made anew"
            ) from error

    @property
    def _store(self) -> BlockStore:
        return self._open().store

    def _open(self) -> _Opened:
        with self._lock:
            if self._opened is None or self._opened.pid != os.getpid():  # threads do not come along when forked
                if self._raw is None and not is_block_store(self.dataset_path):
                    self._raw = self._resolve()
                store, background = self._named() if self._raw is None else self._begin(self._raw)
                capacity = self._room_for_ten(store) if self.cache_bytes is None else self.cache_bytes
                self._opened = _Opened(store, ChunkCache(capacity), background, os.getpid())
            return self._opened

    def _named(self) -> tuple[BlockStore, None]:
        """Open the block store at the path itself."""
        return BlockStore.open(self.dataset_path, disk_cache_for(self.dataset_path, self.disk_cache_bytes)), None

    def _resolve(self) -> RawDataset:
        from penstock.blocks.raw import resolve_raw
        from penstock.blocks.request import IngestRequest
        from penstock.sources import ReadOptions

        options: dict[str, Any] = dict(self._raw_options)
        read = ReadOptions(encoding=options.pop("encoding"))
        return resolve_raw(self.dataset_path, IngestRequest(block_size=self.samples_per_block, options=read, **options))

    def _begin(self, raw: RawDataset) -> tuple[BlockStore, BackgroundIngest | None]:
        """Open the block store that a raw data set becomes, seeing to it that it does."""
        storage = LocalStorage(raw.store_path)
        if finished_manifest(storage) is not None:
            return BlockStore.open(raw.store_path), None

        def has_begun() -> bool:
            from penstock.blocks.journal import Journal

            return Journal(storage).header() is not None or finished_manifest(storage) is not None

        from penstock.blocks.background import BackgroundIngest

        background = BackgroundIngest(raw)
        background.start()
        try:
            background.wait_for(has_begun, timeout_s=self.wait_timeout_s, what="the beginning")
            return BlockStore.open(raw.store_path), background
        except BaseException:
            background.stop()
            raise

    def _room_for_ten(self, store: BlockStore) -> int:
        """Ten chunks of the densest block."""
        weights = (block.size_bytes / max(1, block.sample_count) for block in store.manifest.blocks)
        return int(_CACHED_CHUNKS * self.dataset_chunk_size * max(weights, default=_GUESSED_SAMPLE_BYTES))


def _rebuild(
    path: str, per_block: int, chunk_size: int, chosen: dict[str, Any], raw: RawDataset | None
) -> BlockManager:
    manager = BlockManager(path, per_block, chunk_size, **chosen)
    manager._raw = raw
    return manager


def _check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ConfigError(f"chunk size {chunk_size} cannot hold a sample: expected 1 or more")

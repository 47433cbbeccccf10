"""The token cache: a data set's tokens on disk, block by block, memory-mapped; built once, read at memory speed.

    <data set>/tokens/<tokenizer>/
      header.json             the data set and the tokenizer it belongs to, and the type of its numbers
      block_00000.ids         ids of the block's samples, end to end, each sample closed by end of text
      block_00000.idx         where each sample ends and a running CRC, as in a block's own index
      block_00000.json        the block's checksum and counts; written last, so what has it is whole

It is a cache: deleting it loses nothing, and it never holds the only copy of anything. Several processes share one; a
block is tokenised by whoever needs it first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
from isal import isal_zlib

from penstock.blocks import BlockManager, cache_folder
from penstock.blocks.index import IndexBuilder, read_index
from penstock.errors import BlockStoreError, ConfigError, CorruptBlockError, StorageBusy, StorageError
from penstock.feed.tokenizer import Tokenizer
from penstock.storage import LocalStorage

_VERSION = 1
_OPEN_BLOCKS = 256
_BUILD_CHUNK_BYTES = 8 << 20
_BUSY_POLL_S = 0.05
_BUSY_TIMEOUT_S = 1800.0
_HEADER = "header.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCacheHeader:
    """What a token cache belongs to."""

    version: int
    dataset_id: str
    tokenizer_fingerprint: str
    dtype: str
    end_of_text_id: int
    vocab_size: int


class TokenBlock:
    """The tokens of one block, memory-mapped."""

    def __init__(self, path: Path, dtype: np.dtype, index: np.ndarray) -> None:
        self._path = path
        self._checked = False
        size = path.stat().st_size
        self.ids = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
        self._crcs = np.ascontiguousarray(index["crc"])
        self.offsets = (index["offset"] // dtype.itemsize).astype(np.int64)
        """Where each sample begins, in tokens; one more than samples."""
        if self.offsets[-1] != len(self.ids):
            raise CorruptBlockError(f"{path} holds {len(self.ids)} tokens, expected {self.offsets[-1]}")

    @property
    def sample_count(self) -> int:
        return len(self.offsets) - 1

    def check(self) -> None:
        """Check the whole block, once: for those who read samples here and there."""
        if not self._checked:
            self.samples(0, self.sample_count)
            self._checked = True

    def samples(self, start: int, stop: int) -> np.ndarray:
        """The tokens of samples ``[start, stop)``, checked; a view of the file."""
        ids = self.ids[self.offsets[start] : self.offsets[stop]]
        if isal_zlib.crc32(ids, int(self._crcs[start])) != int(self._crcs[stop]):
            raise CorruptBlockError(
                f"{self._path}: samples {start} to {stop} are not what was written: delete the folder "
                f"{self._path.parent}, it is a cache and is made anew"
            )
        return ids


class TokenCache:
    """Tokens of a data set under one tokenizer. Safe for threads and processes; constructing does no I/O."""

    def __init__(
        self,
        blocks: BlockManager,
        tokenizer: Tokenizer | None,
        *,
        folder: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Remember what to tokenise, and with what.

        Args:
            blocks: The data set.
            tokenizer: None for a data set that came tokenised.
            folder: Where the cache is; beside the data set, or in the cache folder where that cannot be written.
            max_bytes: How much disk it may take; the blocks used longest ago go first.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes} holds no token: expected 1 or more")
        self.blocks = blocks
        self.tokenizer = tokenizer
        self.max_bytes = max_bytes
        self._folder = Path(folder) if folder is not None else None
        self._lock = threading.Lock()
        self._opened: tuple[LocalStorage, TokenCacheHeader] | None = None
        self._kept: OrderedDict[int, TokenBlock] = OrderedDict()

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.blocks, self.tokenizer, self._folder, self.max_bytes)

    @property
    def folder(self) -> Path:
        return self._open()[0].root

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._open()[1].dtype)

    def block(self, block_id: int) -> TokenBlock:
        """A block's tokens; tokenised first, where nobody has."""
        with self._lock:
            kept = self._kept.get(block_id)
            if kept is not None:
                self._kept.move_to_end(block_id)
                return kept
        found = self._read(block_id)
        if found is None:
            self._build(block_id)
            found = self._read(block_id)
            if found is None:
                raise StorageError(f"{self.folder}: block {block_id} is gone as soon as it was made: raise max_bytes")
        with self._lock:
            self._kept[block_id] = found
            while len(self._kept) > _OPEN_BLOCKS:
                self._kept.popitem(last=False)
        return found

    def has(self, block_id: int) -> bool:
        """Whether a block is there, and of the data set as it is now."""
        storage, _ = self._open()
        try:
            told = orjson.loads(storage.get(_name(block_id, "json")))
        except (StorageError, orjson.JSONDecodeError):
            return False
        return told.get("block_checksum") == self.blocks.get_block(block_id).checksum

    def build(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Tokenise every block that is not there yet. `on_progress` gets (blocks done, blocks in all)."""
        total = self.blocks.get_total_blocks()
        if total is None:
            raise BlockStoreError(f"{self.blocks.dataset_path} is not complete: finish its ingest first")
        for block_id in range(total):
            if not self.has(block_id):
                self._build(block_id)
            if on_progress is not None:
                on_progress(block_id + 1, total)

    def close(self) -> None:
        """Let go of the files; used again, it opens them again."""
        with self._lock:
            self._kept.clear()

    # -- reading and building ------------------------------------------------------------------------------------------

    def _read(self, block_id: int) -> TokenBlock | None:
        storage, header = self._open()
        if not self.has(block_id):
            return None
        try:
            index = read_index(storage, _name(block_id, "idx"))
            found = TokenBlock(storage.root / _name(block_id, "ids"), np.dtype(header.dtype), index)
        except (CorruptBlockError, OSError):
            return None  # half deleted, by an eviction or by hand: it is made anew
        if found.sample_count != self.blocks.get_block(block_id).sample_count:
            return None
        os.utime(storage.root / _name(block_id, "json"))  # the time it was last used: evictions go by it
        return found

    def _build(self, block_id: int) -> None:
        storage, _ = self._open()
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                with storage.exclusive(_name(block_id, "lock"), purpose="tokenising"):
                    if self.has(block_id) and self._read(block_id) is not None:
                        return
                    storage.discard_unfinished(f"block_{block_id:05d}.")
                    self._tokenise(storage, block_id)
                    break
            except StorageBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_BUSY_POLL_S)
        if self.max_bytes is not None:
            self._evict(storage, self.max_bytes, keep=block_id)

    def _tokenise(self, storage: LocalStorage, block_id: int) -> None:
        storage.delete(_name(block_id, "json"))
        block = self.blocks.get_block(block_id)
        index, num_tokens = IndexBuilder(), 0
        per_chunk = self._chunk_samples(block_id)
        with storage.writer(_name(block_id, "ids")) as writer:
            for chunk_id in range(block.chunk_count(per_chunk)):
                ids, offsets = self._encode(block_id, chunk_id, per_chunk)
                data = ids.astype(self.dtype).tobytes()
                writer.write(data)
                view, bounds = memoryview(data), (offsets * self.dtype.itemsize).tolist()
                index.extend([view[start:stop] for start, stop in pairwise(bounds)])
                num_tokens += len(ids)
        storage.put(_name(block_id, "idx"), index.to_bytes())
        told = {"block_checksum": block.checksum, "sample_count": block.sample_count, "num_tokens": num_tokens}
        storage.put(_name(block_id, "json"), orjson.dumps(told))

    def _encode(self, block_id: int, chunk_id: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        if self.tokenizer is not None and self.blocks.manifest.header.token_column is None:
            encoded = self.tokenizer.encode(self.blocks.get_chunk(block_id, chunk_id, size))
            return encoded.ids, encoded.offsets
        ids, offsets = self.blocks.get_tokens(block_id, chunk_id, size)
        vocab_size = self._open()[1].vocab_size
        if len(ids) and ids.max() >= vocab_size:
            raise ConfigError(
                f"block {block_id} holds token {ids.max()}, the tokenizer has {vocab_size}: "
                "name the tokenizer that this data set was made with"
            )
        return ids, offsets

    def _chunk_samples(self, block_id: int) -> int:
        """Samples to tokenise at a time: a few megabytes of text, whatever a sample's size."""
        entry = self.blocks.manifest.blocks[block_id]
        return max(1, min(entry.sample_count, _BUILD_CHUNK_BYTES * entry.sample_count // max(1, entry.size_bytes)))

    def _evict(self, storage: LocalStorage, max_bytes: int, *, keep: int) -> None:
        """Delete the blocks used longest ago until the cache is within its size. Readers keep what they have open."""
        sizes: dict[str, int] = {}
        for info in storage.list("block_"):
            stem = info.key.partition(".")[0]
            sizes[stem] = sizes.get(stem, 0) + info.size_bytes
        total = sum(sizes.values())
        oldest = sorted(sizes, key=lambda stem: _last_used(storage.root / f"{stem}.json"))
        for stem in oldest:
            if total <= max_bytes:
                return
            if stem != f"block_{keep:05d}":
                for suffix in ("json", "idx", "ids"):  # what makes it whole goes first
                    storage.delete(f"{stem}.{suffix}")
                total -= sizes[stem]

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[LocalStorage, TokenCacheHeader]:
        with self._lock:
            if self._opened is None:
                header = self._wanted_header()
                storage = LocalStorage(self._folder or self._choose_folder(header))
                self._settle(storage, header)
                self._opened = storage, header
            return self._opened

    def _wanted_header(self) -> TokenCacheHeader:
        header = self.blocks.manifest.header
        if self.tokenizer is None:
            raise ConfigError(f"{self.blocks.dataset_path}: a token cache needs a tokenizer: name one")
        return TokenCacheHeader(
            version=_VERSION,
            dataset_id=header.dataset_id,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            dtype="<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4",
            end_of_text_id=self.tokenizer.end_of_text_id,
            vocab_size=self.tokenizer.vocab_size,
        )

    def _choose_folder(self, header: TokenCacheHeader) -> Path:
        name = header.tokenizer_fingerprint.removeprefix("sha256:")[:16]
        beside = self.blocks.store_path
        if beside is not None and os.access(beside, os.W_OK):
            return beside / "tokens" / name
        return cache_folder() / "tokens" / header.dataset_id.removeprefix("sha256:")[:16] / name

    def _settle(self, storage: LocalStorage, header: TokenCacheHeader) -> None:
        wanted = asdict(header)
        if storage.exists(_HEADER):
            try:
                found = orjson.loads(storage.get(_HEADER))
            except orjson.JSONDecodeError:
                found = None
            if found == wanted:
                return
            if self._folder is not None:
                raise ConfigError(
                    f"{storage.url} is the token cache of other data or of another tokenizer: choose another folder"
                )
        storage.put(_HEADER, orjson.dumps(wanted))


def _rebuild(
    blocks: BlockManager, tokenizer: Tokenizer | None, folder: Path | None, max_bytes: int | None
) -> TokenCache:
    return TokenCache(blocks, tokenizer, folder=folder, max_bytes=max_bytes)


def _name(block_id: int, suffix: str) -> str:
    return f"block_{block_id:05d}.{suffix}"


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

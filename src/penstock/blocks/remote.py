"""Samples of a block store behind a network: one request a range once the index is known, none where it is on disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from penstock.blocks.index import (
    ENTRY,
    BytesOfSamples,
    advice,
    check_index,
    entries_of,
    index_bytes,
    refuse_damaged,
)
from penstock.blocks.manifest import BlockEntry
from penstock.errors import CorruptBlockError, ObjectNotFound, PreconditionFailed
from penstock.storage import ObjectInfo, ObjectStorage
from penstock.storage.disk_cache import PIECE_BYTES, CachedObject, DiskCache

T = TypeVar("T")
INDEXES_BYTES = 128 << 20
"""How much of a remote store's indexes stays in memory: those of some ten million samples."""
_SMALL_SHARE = 64
"""A range of less than this share of its block is not worth its whole index, where the indexes have no room anyway."""


class RemoteBytes:
    """`SampleBytes` of an object store. Indexes are read whole and kept in memory within `INDEXES_BYTES`, so that a
    range is one request for the block's bytes; both go through the disk cache, where there is one, and then cost none.

    With a disk cache there is one more request a file and process, which tells the file's version.
    """

    def __init__(self, storage: ObjectStorage, blocks: Sequence[BlockEntry], cache: DiskCache | None) -> None:
        index_total_bytes = sum(index_bytes(entry.sample_count) for entry in blocks)
        store_bytes = sum(entry.size_bytes for entry in blocks)
        self._storage = storage
        self._cache = cache
        self._fits = cache is not None and store_bytes + index_total_bytes <= cache.capacity_bytes
        """Whether all of the store has room in the cache, so that even a single sample is worth a whole piece there."""
        self._keeps_all = index_total_bytes <= INDEXES_BYTES
        self._lock = threading.Lock()
        self._indexes: OrderedDict[int, np.ndarray] = OrderedDict()
        self._indexes_bytes = 0
        self._reading: dict[int, threading.Lock] = {}
        self._infos: dict[str, ObjectInfo] = {}
        self._checked: set[int] = set()

    def read(self, entry: BlockEntry, start: int, stop: int) -> bytes:
        place = self._place(entry, start, stop)
        if place.begin > place.end or place.end > entry.size_bytes:
            refuse_damaged(self._storage, entry.file, start, stop, place)
        data = self._bytes(entry.file, entry.size_bytes, place.begin, place.end)
        if not place.holds(data):
            data = self._anew(entry, place)
        if not place.holds(data):
            refuse_damaged(self._storage, entry.file, start, stop, place)
        return data

    def _place(self, entry: BlockEntry, start: int, stop: int) -> BytesOfSamples:
        with self._lock:
            kept = self._indexes.get(entry.block_id)
            if kept is not None:
                self._indexes.move_to_end(entry.block_id)
        if kept is None:
            if not self._keeps_all and (stop - start) * _SMALL_SHARE < entry.sample_count:
                return self._place_alone(entry, start, stop)
            kept = self._index(entry)
        return BytesOfSamples.between(kept[start], kept[stop])

    def _index(self, entry: BlockEntry) -> np.ndarray:
        """The whole index of a block; of threads that want the same, one reads it."""
        with self._lock:
            turn = self._reading.setdefault(entry.block_id, threading.Lock())
        with turn:
            with self._lock:
                kept = self._indexes.get(entry.block_id)
            if kept is not None:
                return kept
            size = index_bytes(entry.sample_count)
            entries = entries_of(self._bytes(entry.index_file, size, 0, size, fill=True), self._storage, entry)
            with self._lock:
                self._indexes[entry.block_id] = entries
                self._indexes_bytes += entries.nbytes
                while self._indexes_bytes > INDEXES_BYTES and len(self._indexes) > 1:
                    self._indexes_bytes -= self._indexes.popitem(last=False)[1].nbytes
                self._reading.pop(entry.block_id, None)
            return entries

    def _place_alone(self, entry: BlockEntry, start: int, stop: int) -> BytesOfSamples:
        if entry.block_id not in self._checked:
            check_index(self._storage, entry)
            self._checked.add(entry.block_id)
        size, before = index_bytes(entry.sample_count), index_bytes(start - 1)
        raw = self._bytes(entry.index_file, size, before, index_bytes(stop))
        entries = np.frombuffer(raw, dtype=ENTRY)
        return BytesOfSamples.between(entries[0], entries[-1])

    def _anew(self, entry: BlockEntry, place: BytesOfSamples) -> bytes:
        """Once more from the store itself: neither a piece on this disk nor a version seen before may stand between."""
        with self._lock:
            info = self._infos.pop(entry.file, None)
        if self._cache is not None and info is not None and info.version is not None:
            self._cache.forget(self._cached(info), place.begin, place.end)
        return self._told(entry.file, lambda: self._storage.get_range(entry.file, place.begin, place.end))

    def _bytes(self, file: str, size_bytes: int, start: int, stop: int, *, fill: bool = False) -> bytes:
        if start == stop:
            return b""
        if self._cache is None:
            return self._told(file, lambda: self._storage.get_range(file, start, stop))
        try:
            return self._through(self._cache, file, size_bytes, start, stop, fill=fill)
        except PreconditionFailed:  # written again since it was first looked at; its CRCs tell whether that matters
            with self._lock:
                self._infos.pop(file, None)
            return self._told(file, lambda: self._storage.get_range(file, start, stop))

    def _through(self, cache: DiskCache, file: str, size_bytes: int, start: int, stop: int, *, fill: bool) -> bytes:
        info = self._infos.get(file)
        if info is None:
            info = self._told(file, lambda: self._storage.head(file))
            with self._lock:
                self._infos[file] = info
        if info.size_bytes != size_bytes:
            raise CorruptBlockError(
                f"{self._storage.url}/{file} has {info.size_bytes} bytes, expected {size_bytes}: "
                f"{advice(self._storage)}"
            )

        def fetch(first: int, behind: int) -> bytes:
            return self._told(file, lambda: self._storage.get_range_of(info, first, behind))

        if info.version is None:  # what cannot be told from a later one is not kept
            return fetch(start, stop)
        fill = fill or self._fits or (stop - start) * 4 >= PIECE_BYTES
        return cache.read(self._cached(info), start, stop, fetch, fill=fill)

    def _cached(self, info: ObjectInfo) -> CachedObject:
        return CachedObject(f"{self._storage.address.told}/{info.key}", info.version or "", info.size_bytes)

    def _told(self, file: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except ObjectNotFound as error:
            raise CorruptBlockError(f"{self._storage.url}/{file} is missing: {advice(self._storage)}") from error

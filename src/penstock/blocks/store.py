"""Reads a block store: its manifest, and any range of any block."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import orjson

from penstock.blocks.manifest import MANIFEST_KEY, BlockEntry, Manifest
from penstock.blocks.reading import bytes_of
from penstock.errors import BlockStoreError, CorruptBlockError, ObjectNotFound
from penstock.storage import Storage, open_storage

if TYPE_CHECKING:
    from penstock.storage.disk_cache import DiskCache

_PARSED_BYTES = 32 << 10


class BlockStore:
    """An open block store, complete or still growing. Safe for threads; pickles to spawned processes.

    Memory: the manifest, and of a remote store its indexes within a bound. A range costs the same for the first sample
    of a block as for the last: of a local store one read of the index and one of the block; of a remote one a request
    for the block's bytes, or none where they are in the disk cache. Once a block a look at whether its index is the one
    the manifest means.
    """

    def __init__(self, storage: Storage, manifest: Manifest, disk_cache: DiskCache | None = None) -> None:
        self.storage = storage
        self.manifest = manifest
        self._disk_cache = disk_cache
        self._bytes = bytes_of(storage, manifest.blocks, disk_cache)

    def __reduce__(self) -> tuple[object, ...]:
        return BlockStore, (self.storage, self.manifest, self._disk_cache)

    @classmethod
    def open(cls, path: str | os.PathLike[str], disk_cache: DiskCache | None = None) -> BlockStore:
        """Open the store at a path or URL. `disk_cache` is for remote ones, and of no use to a local one."""
        if Path(path).is_file():
            raise BlockStoreError(
                f"{os.fspath(path)} is a file, not a block store: "
                f"make one of it with `penstock ingest {os.fspath(path)} DEST`"
            )
        storage = open_storage(path)
        return cls(storage, read_manifest(storage), disk_cache)

    def block(self, block_id: int) -> BlockEntry:
        """One block's entry; an IndexError's worth of explanation where there is none."""
        blocks = self.manifest.blocks
        if 0 <= block_id < len(blocks):
            return blocks[block_id]
        raise BlockStoreError(f"{self.storage.url} has no block {block_id}: its blocks are 0 to {len(blocks) - 1}")

    def refresh(self) -> None:
        """Look for blocks that have come since; costs one look where none has, nothing where the store is complete."""
        if self.manifest.complete:
            return
        from penstock.blocks.journal import Journal  # a store that is complete has none

        journal = Journal(self.storage)
        entries = list(self.manifest.blocks)
        while (marker := journal.marker(len(entries))) is not None:
            entries.append(marker.entry)
        if len(entries) > len(self.manifest.blocks):
            self.manifest = replace(self.manifest, blocks=entries)
        else:
            self.manifest = finished_manifest(self.storage) or self.manifest

    def lines(self, block_id: int, start: int, stop: int) -> list[bytes]:
        """The stored rows ``[start, stop)`` of a block, as JSON, checked against the index's CRC."""
        return split_lines(self.samples(block_id, start, stop), self.block(block_id), start, stop)

    def samples(self, block_id: int, start: int, stop: int) -> bytes:
        """The stored bytes of samples ``[start, stop)`` of a block, a line each, checked against the index's CRC."""
        entry = self.block(block_id)
        if not 0 <= start <= stop <= entry.sample_count:
            raise BlockStoreError(
                f"samples {start} to {stop} are not in block {block_id}: "
                f"expected 0 <= start <= stop <= {entry.sample_count}"
            )
        return self._bytes.read(entry, start, stop) if stop > start else b""


def parse_lines(data: bytes, entry: BlockEntry, start: int, stop: int) -> list[dict[str, Any]]:
    """The rows of stored bytes, parsed a few at a time.

    Inside JSON a newline is always escaped, so lines become an array. A few rows a call cost less than one a call, and
    stay in the processor's cache; all rows in one call cost twice as much.
    """
    rows: list[dict[str, Any]] = []
    place, end = 0, len(data)
    while place < end:
        cut = data.find(b"\n", place + _PARSED_BYTES) + 1 or end
        rows += orjson.loads(b"[%b]" % data[place : cut - 1].replace(b"\n", b","))
        place = cut
    if len(rows) != stop - start:
        _refuse_count(len(rows), entry, start, stop)
    return rows


def split_lines(data: bytes, entry: BlockEntry, start: int, stop: int) -> list[bytes]:
    """The rows of stored bytes, which must be as many as were asked for."""
    lines = data.split(b"\n")[:-1]
    if len(lines) != stop - start:
        _refuse_count(len(lines), entry, start, stop)
    return lines


def _refuse_count(got: int, entry: BlockEntry, start: int, stop: int) -> NoReturn:
    raise CorruptBlockError(
        f"{entry.index_file} gives {got} samples for samples {start} to {stop}: "
        "the index is damaged; see what else is with `penstock inspect DATASET --verify`, and ingest again"
    )


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of a complete store, or the like made from the journal of one still being written."""
    manifest = finished_manifest(storage)
    if manifest is None:
        growing = _growing(storage)
        # The manifest is written before the journal goes: if it is still not there, the journal was read whole.
        manifest = finished_manifest(storage) or growing
    if manifest is None:
        raise BlockStoreError(
            f"{storage.url} is not a block store: it has no {MANIFEST_KEY}; "
            f"make one with `penstock ingest SOURCE {storage.url}`"
        )
    return manifest


def finished_manifest(storage: Storage) -> Manifest | None:
    """The manifest of a complete store; None where there is none."""
    try:
        return Manifest.from_json(storage.get(MANIFEST_KEY), f"{storage.url}/{MANIFEST_KEY}")
    except ObjectNotFound:
        return None


def _growing(storage: Storage) -> Manifest | None:
    from penstock.blocks.journal import Journal

    journal = Journal(storage)
    header = journal.header()
    if header is None:
        return None
    markers = journal.markers()
    return Manifest(
        header=header,
        complete=False,
        blocks=[marker.entry for marker in markers],
        skipped_count=markers[-1].skipped_count if markers else 0,
        skipped_rows=[row for marker in markers for row in marker.skipped_rows],
    )

"""Writes one block: lines in, a whole block with its index out."""

from __future__ import annotations

import hashlib

from penstock.blocks.index import IndexBuilder
from penstock.blocks.manifest import BlockEntry
from penstock.storage import Storage


class BlockWriter:
    """One block being written. Leaving the `with` block makes it visible; an exception leaves nothing."""

    def __init__(self, storage: Storage, block_id: int, start_index: int) -> None:
        self._storage = storage
        self._block_id = block_id
        self._start_index = start_index
        self._file = f"blocks/block_{block_id:05d}.jsonl"
        self._writer = storage.writer(self._file)
        self._index = IndexBuilder()
        self._digest = hashlib.sha256()
        self.sample_count = 0
        self.size_bytes = 0

    def __enter__(self) -> BlockWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._writer.__exit__(*exc_info)

    def append(self, lines: list[bytes]) -> None:
        """Add samples, as stored: one JSON object and a newline each."""
        data = b"".join(lines)
        self._writer.write(data)
        self._digest.update(data)
        self._index.extend(lines)
        self.sample_count += len(lines)
        self.size_bytes += len(data)

    def finish(self) -> BlockEntry:
        """Write the index, after the block itself is visible, and say what was written."""
        entry = BlockEntry(
            block_id=self._block_id,
            file=self._file,
            sample_count=self.sample_count,
            start_index=self._start_index,
            end_index=self._start_index + self.sample_count,
            size_bytes=self.size_bytes,
            checksum="sha256:" + self._digest.hexdigest(),
        )
        self._storage.put(entry.index_file, self._index.to_bytes())
        return entry

"""Ranges of sample ids, over the blocks they lie in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.blocks import BlockManager
from penstock.errors import BlockStoreError


class BlockRange(NamedTuple):
    """Samples ``[start, stop)`` of one block."""

    block_id: int
    start: int
    stop: int


class BlockRanges:
    """Where samples lie. Holds one number a block."""

    def __init__(self, blocks: BlockManager) -> None:
        blocks.wait_until_complete()
        manifest = blocks.manifest
        if not manifest.complete:
            raise BlockStoreError(
                f"{blocks.dataset_path} is not complete, and this plan needs all of it: finish its ingest first"
            )
        starts = [block.start_index for block in manifest.blocks]
        self._starts = np.array([*starts, manifest.total_samples], dtype=np.int64)

    @property
    def total_samples(self) -> int:
        return int(self._starts[-1])

    @property
    def block_count(self) -> int:
        return len(self._starts) - 1

    def locate(self, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The block of each sample, and its place in it."""
        block_ids = np.searchsorted(self._starts, sample_ids, side="right") - 1
        return block_ids, sample_ids - self._starts[block_ids]

    def pieces(self, start: int, stop: int) -> Iterator[BlockRange]:
        """The parts of blocks that make up the samples ``[start, stop)``, in order."""
        block_id = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, last = int(self._starts[block_id]), int(self._starts[block_id + 1])
            if last > start:
                yield BlockRange(block_id, start - first, min(stop, last) - first)
                start = last
            block_id += 1

"""Texts of samples from anywhere, read chunk by chunk and kept while they are needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from penstock.blocks import BlockManager
from penstock.feed.ranges import BlockRanges
from penstock.feed.timings import Timings

_ROW_BYTES = 600
"""What a parsed row takes beside its text, about."""


class SampleReader:
    """Rows of samples by id. Keeps the chunks used last within a number of bytes. Safe for threads."""

    def __init__(
        self, blocks: BlockManager, ranges: BlockRanges, *, chunk_size: int, cache_bytes: int, timings: Timings
    ) -> None:
        self._blocks = blocks
        self._ranges = ranges
        self._chunk_size = chunk_size
        self._cache_bytes = cache_bytes
        self._timings = timings
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[int, list[dict[str, Any]]]] = OrderedDict()
        self._kept_bytes = 0

    def rows(self, sample_ids: np.ndarray) -> list[dict[str, Any]]:
        """The rows of these samples, in this order."""
        size = self._chunk_size
        with self._lock:
            return [self._chunk(sample_id // size)[sample_id % size] for sample_id in sample_ids.tolist()]

    def batch(self, sample_ids: np.ndarray) -> tuple[dict[str, Any], int]:
        """The texts of these samples, or their rows where they have none; and about how many bytes that is."""
        rows = self.rows(sample_ids)
        if self._blocks.manifest.header.text_column is None:
            return {"rows": rows, "sample_ids": sample_ids}, 1024 * len(rows)
        texts = self._blocks.texts_of(rows)
        return {"text": texts, "sample_ids": sample_ids}, sum(map(len, texts)) + 64 * len(texts)

    def _chunk(self, number: int) -> list[dict[str, Any]]:
        kept = self._kept.get(number)
        if kept is not None:
            self._kept.move_to_end(number)
            return kept[1]
        start = number * self._chunk_size
        stop = min(start + self._chunk_size, self._ranges.total_samples)
        size, rows = 0, []
        for piece in self._ranges.pieces(start, stop):
            with self._timings.of("fetch"):
                data = self._blocks.read_range(piece.block_id, piece.start, piece.stop)
            with self._timings.of("decode"):
                rows += self._blocks.parse_range(data, piece.block_id, piece.start, piece.stop)
            size += len(data) + _ROW_BYTES * (piece.stop - piece.start)
        self._kept[number] = size, rows
        self._kept_bytes += size
        while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped
        return rows

"""Tokens of any samples, brought together in any order at the speed of memory.

A window's chunks are joined, then its samples are put in the plan's order. The second step is a copy of many pieces of
uneven length; Arrow does that for binary values with one copy a value, so tokens go through it as bytes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.feed.ranges import BlockRanges
from penstock.feed.token_cache import TokenCache


def read_tokens(cache: TokenCache, ranges: BlockRanges, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of consecutive samples, end to end, and where each begins; checked. A view where it can be one."""
    pieces, lengths = [], [np.zeros(1, dtype=np.int64)]
    for piece in ranges.pieces(start, stop):
        block = cache.block(piece.block_id)
        pieces.append(block.samples(piece.start, piece.stop))
        lengths.append(np.diff(block.offsets[piece.start : piece.stop + 1]))
    ids = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, dtype=cache.dtype), *pieces])
    return ids, np.cumsum(np.concatenate(lengths))


def join(parts: list[tuple[np.ndarray, np.ndarray]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Several runs of samples as one."""
    ids = np.concatenate([np.empty(0, dtype=dtype), *(ids for ids, _ in parts)])
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(np.diff(offsets) for _, offsets in parts)])
    return ids, np.cumsum(lengths)


def reorder(ids: np.ndarray, offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples in another order, or some of them: sample i of the result is sample ``order[i]``."""
    width = ids.dtype.itemsize
    buffers = [None, pa.py_buffer(offsets * width), pa.py_buffer(np.ascontiguousarray(ids))]
    values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    taken = values.take(pa.array(order, type=pa.int64()))
    _, new_offsets, data = taken.buffers()
    placed = np.frombuffer(new_offsets, dtype=np.int64)[: len(order) + 1] // width
    if data is None or not len(order):
        return np.empty(0, dtype=ids.dtype), np.zeros(len(order) + 1, dtype=np.int64)
    return np.frombuffer(data, dtype=ids.dtype, count=int(placed[-1])), placed


def gather(cache: TokenCache, ranges: BlockRanges, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of samples from anywhere, in this order. Costs a copy a sample, and a look at each block touched."""
    by_place = np.argsort(sample_ids, kind="stable")
    block_ids, places = ranges.locate(sample_ids[by_place])
    parts = []
    for block_id in np.unique(block_ids).tolist():
        block = cache.block(block_id)
        block.check()
        parts.append(reorder(block.ids, block.offsets, places[block_ids == block_id]))
    ids, offsets = join(parts, cache.dtype)
    back = np.empty(len(by_place), dtype=np.int64)
    back[by_place] = np.arange(len(by_place))
    return reorder(ids, offsets, back)

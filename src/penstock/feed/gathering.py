"""Tokens of any samples, brought together in any order at the speed of memory.

A window's chunks are joined, then its samples are put in the plan's order. The second step is a copy of many pieces of
uneven length; Arrow does that for binary values with one copy a value, so tokens go through it as bytes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.feed.token_store import TokenChunk


def join(parts: list[TokenChunk], dtype: np.dtype) -> TokenChunk:
    """Several runs of samples as one."""
    ids = np.concatenate([np.empty(0, dtype=dtype), *(part.ids for part in parts)])
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(np.diff(part.offsets) for part in parts)])
    return TokenChunk(ids, np.cumsum(lengths))


def reorder(samples: TokenChunk, order: np.ndarray) -> TokenChunk:
    """Samples in another order, or some of them: sample i of the result is sample ``order[i]``."""
    ids, offsets = samples.ids, samples.offsets
    width = ids.dtype.itemsize
    buffers = [None, pa.py_buffer(offsets * width), pa.py_buffer(np.ascontiguousarray(ids))]
    values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    taken = values.take(pa.array(order, type=pa.int64()))
    _, new_offsets, data = taken.buffers()
    placed = np.frombuffer(new_offsets, dtype=np.int64)[: len(order) + 1] // width
    if data is None or not len(order):
        return TokenChunk(np.empty(0, dtype=ids.dtype), np.zeros(len(order) + 1, dtype=np.int64))
    return TokenChunk(np.frombuffer(data, dtype=ids.dtype, count=int(placed[-1])), placed)

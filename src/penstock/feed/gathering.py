"""Tokens of any samples, brought together in any order at the speed of memory.

    all of one length      rows of matrices, copied a row at a time
    many, of any length    joined and put in order by Arrow, which copies binary values: tokens go through it as bytes
    few, of any length     one by one

Each is a copy or two of every token, and calls that let go of the interpreter while they copy.
"""

from __future__ import annotations

import sys

import numpy as np

from penstock.feed.buffers import Buffers
from penstock.feed.gathered import GatheredIds, common_length
from penstock.feed.token_store import TokenChunk

_FEW = 10_000


def assemble(
    parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray, dtype: np.dtype, buffers: Buffers
) -> TokenChunk:
    """Samples from several runs of samples: sample i of the result is sample ``places[i]`` of run ``of_part[i]``."""
    length = common_length(parts)
    if length is not None:
        return _rows(parts, of_part, places, buffers.take(len(places) * length, dtype).reshape(-1, length))
    few = len(places) <= _FEW and "pyarrow" not in sys.modules  # slow to start: not for the first batches
    if few or len(places) * 4 < sum(len(part.offsets) for part in parts):
        gathered = GatheredIds(parts, of_part, places, dtype)
        return TokenChunk(gathered.whole(buffers.take(len(gathered), dtype)), gathered.offsets)
    firsts = np.cumsum([0, *(len(part.offsets) - 1 for part in parts)])
    return reorder(_join(parts, dtype), firsts[of_part] + places)


def reorder(samples: TokenChunk, order: np.ndarray) -> TokenChunk:
    """Samples in another order, or some of them: sample i of the result is sample ``order[i]``."""
    ids, offsets = samples.ids, samples.offsets
    if len(order) <= _FEW and "pyarrow" not in sys.modules:
        gathered = GatheredIds([samples], np.zeros(len(order), dtype=np.int64), order, ids.dtype)
        return TokenChunk(gathered.whole(), gathered.offsets)
    import pyarrow as pa

    width = ids.dtype.itemsize
    buffers = [None, pa.py_buffer(offsets * width), pa.py_buffer(np.ascontiguousarray(ids))]
    values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    taken = values.take(pa.array(order, type=pa.int64()))
    _, new_offsets, data = taken.buffers()
    placed = np.frombuffer(new_offsets, dtype=np.int64)[: len(order) + 1] // width
    if data is None or not len(order):
        return TokenChunk(np.empty(0, dtype=ids.dtype), np.zeros(len(order) + 1, dtype=np.int64))
    return TokenChunk(np.frombuffer(data, dtype=ids.dtype, count=int(placed[-1])), placed)


def _join(parts: list[TokenChunk], dtype: np.dtype) -> TokenChunk:
    """Several runs of samples as one."""
    ids = np.concatenate([np.empty(0, dtype=dtype), *(part.ids for part in parts)])
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(np.diff(part.offsets) for part in parts)])
    return TokenChunk(ids, np.cumsum(lengths))


def _rows(parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray, rows: np.ndarray) -> TokenChunk:
    length = rows.shape[1]
    by_part = np.argsort(of_part, kind="stable")
    bounds = np.searchsorted(of_part[by_part], np.arange(len(parts) + 1))
    for number, part in enumerate(parts):
        mine = by_part[bounds[number] : bounds[number + 1]]
        held = part.ids.reshape(-1, length)
        if len(mine) == len(held):  # all of them: put where they belong, in one copy
            where = np.empty(len(mine), dtype=np.int64)
            where[places[mine]] = mine
            rows[where] = held
        else:
            rows[mine] = held[places[mine]]
    return TokenChunk(rows.reshape(-1), np.arange(len(places) + 1, dtype=np.int64) * length)

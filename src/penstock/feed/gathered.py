"""Tokens that stay where they lie until a batch asks for them: then they are copied once, into the batch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.feed.token_store import TokenChunk


class GatheredIds:
    """Samples from several runs of samples, end to end, as an array of which slices are taken. Safe for threads.

    Every slice is an array of its own. What a slice costs goes with the samples it touches, so this is for samples that
    are not short.
    """

    def __init__(self, parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray, dtype: np.dtype) -> None:
        firsts = np.cumsum([0, *(len(part.offsets) for part in parts)])
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), *(part.offsets for part in parts)])
        at = firsts[of_part] + places + 1
        self.dtype = dtype
        self.offsets = np.zeros(len(places) + 1, dtype=np.int64)
        starts, stops = offsets[at], offsets[at + 1]
        np.cumsum(stops - starts, out=self.offsets[1:])
        self._bounds: list[int] = self.offsets.tolist()
        held = _Held(parts, dtype)
        first = held.firsts(dtype.itemsize)[of_part]
        spans = map(slice, (starts + first).tolist(), (stops + first).tolist())
        if held.numbers is None:
            self._samples = list(map(held.holders[0].__getitem__, spans))
        else:
            told = zip(held.numbers[of_part].tolist(), spans, strict=True)
            self._samples = [held.holders[number][span] for number, span in told]

    def __len__(self) -> int:
        return self._bounds[-1]

    @property
    def nbytes(self) -> int:
        """Of the tokens, wherever they lie."""
        return len(self) * self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> np.ndarray:
        first, last, _ = wanted.indices(len(self))
        if first >= last:
            return np.empty(0, dtype=self.dtype)
        bounds = self._bounds
        begin, end = bisect_right(bounds, first) - 1, bisect_left(bounds, last)
        pieces = self._samples[begin:end]
        if last < bounds[end]:
            pieces[-1] = pieces[-1][: last - bounds[end]]
        if first > bounds[begin]:
            pieces[0] = pieces[0][first - bounds[begin] :]
        return np.concatenate(pieces)

    def whole(self, out: np.ndarray | None = None) -> np.ndarray:
        """All of it, as one array."""
        return np.concatenate([np.empty(0, dtype=self.dtype), *self._samples], out=out)


class GatheredRows:
    """The same for samples of one length: rows of a matrix, wherever they lie."""

    def __init__(self, rows: _RowsOfParts, of_part: np.ndarray, places: np.ndarray) -> None:
        self.length = rows.matrix.shape[1]
        self.dtype = rows.matrix.dtype
        self.offsets = np.arange(len(places) + 1, dtype=np.int64) * self.length
        self._held = rows
        self._rows = rows.firsts[of_part] + places * rows.step

    def __len__(self) -> int:
        return len(self._rows) * self.length

    @property
    def nbytes(self) -> int:
        """Of the tokens, wherever they lie."""
        return len(self) * self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> np.ndarray:
        first, last, _ = wanted.indices(len(self))
        if first >= last:
            return np.empty(0, dtype=self.dtype)
        begin, end = first // self.length, -(-last // self.length)
        return self.rows(begin, end).reshape(-1)[first - begin * self.length : last - begin * self.length]

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Some of its rows, as a matrix of its own."""
        return self._held.take(self._rows[begin:end])

    def whole(self) -> np.ndarray:
        """All of it, as one array."""
        return self[:]


class _RowsOfParts(NamedTuple):
    """A matrix that has the rows of several runs of samples among its rows."""

    matrix: np.ndarray
    step: int
    """From one row of a run to the next."""
    firsts: np.ndarray
    """The first row of each run."""
    holders: list[np.ndarray]
    """Whose memory it is."""

    def take(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows. Where rows of the matrix overlap, `np.take` would copy the whole of it first."""
        return self.matrix.take(rows, axis=0) if self.step == 1 else self.matrix[rows]

    @classmethod
    def of(cls, parts: list[TokenChunk], length: int, dtype: np.dtype) -> _RowsOfParts | None:
        """None where there is no such matrix."""
        held = _Held(parts, dtype)
        row_bytes = length * dtype.itemsize
        if held.numbers is None and all(part.at % row_bytes == 0 for part in parts):  # as the store puts them
            holder = held.holders[0]
            matrix = holder[: len(holder) // length * length].reshape(-1, length)
            return cls(matrix, 1, held.firsts(row_bytes), held.holders)
        # A row begins at every number in memory, from the first holder to the last; nobody asks for what lies between.
        begins = np.array([holder.__array_interface__["data"][0] for holder in held.holders])
        lowest = int(begins.argmin())
        places, left = np.divmod(begins - begins[lowest], dtype.itemsize)
        count = int((places + [len(holder) for holder in held.holders]).max()) - length + 1
        if left.any() or count < 1 or count * row_bytes >= 1 << 63:
            return None
        matrix = as_strided(held.holders[lowest], (count, length), (dtype.itemsize, dtype.itemsize), writeable=False)
        of_parts = places[0] if held.numbers is None else places[held.numbers]
        return cls(matrix, length, held.firsts(dtype.itemsize) + of_parts, held.holders)


class _Held:
    """What runs of samples lie in: a mapped file or several, each taken for an array of numbers."""

    def __init__(self, parts: list[TokenChunk], dtype: np.dtype) -> None:
        held_by = [part.holder for part in parts]
        holders = {id(holder): holder for holder in held_by}
        self.holders = [
            holder[: len(holder) // dtype.itemsize * dtype.itemsize].view(dtype) for holder in holders.values()
        ]
        self.numbers = None
        """Of each run's; None where all lie in one."""
        if len(holders) != 1:
            places = {key: number for number, key in enumerate(holders)}
            self.numbers = np.array([places[id(holder)] for holder in held_by], dtype=np.int64)
        self._at = np.array([part.at for part in parts], dtype=np.int64)

    def firsts(self, unit_bytes: int) -> np.ndarray:
        """Where each run begins in what holds it, counted in such units."""
        return self._at // unit_bytes


Ids = np.ndarray | GatheredIds | GatheredRows


def gather(
    parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray, dtype: np.dtype
) -> GatheredIds | GatheredRows:
    """Samples from several runs of samples: sample i is sample ``places[i]`` of run ``of_part[i]``."""
    length = common_length(parts)
    rows = _RowsOfParts.of(parts, length, dtype) if length else None
    return GatheredIds(parts, of_part, places, dtype) if rows is None else GatheredRows(rows, of_part, places)


def common_length(parts: list[TokenChunk]) -> int | None:
    """The length of all samples, where they have one."""
    lengths = {part.common_length() for part in parts if len(part.offsets) > 1}
    length = lengths.pop() if len(lengths) == 1 else 0
    return length or None


def as_array(ids: Ids) -> np.ndarray:
    return ids if isinstance(ids, np.ndarray) else ids.whole()

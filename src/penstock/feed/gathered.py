"""Tokens that stay where they lie until a batch asks for them: then they are copied once, into the batch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

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
        np.cumsum(offsets[at + 1] - offsets[at], out=self.offsets[1:])
        ids = [part.ids for part in parts]
        starts, stops = offsets[at].tolist(), offsets[at + 1].tolist()
        told = zip(of_part.tolist(), starts, stops, strict=True)
        self._samples = [ids[number][start:stop] for number, start, stop in told]
        self._bounds: list[int] = self.offsets.tolist()

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
    """The same for samples of one length that lie at multiples of it, as the store puts them: rows of a matrix."""

    def __init__(
        self, parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray, length: int, dtype: np.dtype
    ) -> None:
        self.dtype = dtype
        self.length = length
        row_bytes = length * dtype.itemsize
        self.offsets = np.arange(len(places) + 1, dtype=np.int64) * length
        held_by = [part.holder for part in parts]
        holders = {id(holder): holder for holder in held_by}
        numbers = {key: number for number, key in enumerate(holders)}
        self._holders = [
            holder[: len(holder) // row_bytes * row_bytes].view(dtype).reshape(-1, length)
            for holder in holders.values()
        ]
        self._rows = np.array([part.at // row_bytes for part in parts], dtype=np.int64)[of_part] + places
        self._holder_of = None
        if len(holders) > 1:
            self._holder_of = np.array([numbers[id(holder)] for holder in held_by], dtype=np.int64)[of_part]

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
        rows = self._rows[begin:end]
        if self._holder_of is None:
            copied = self._holders[0].take(rows, axis=0).reshape(-1)
        else:
            told = zip(self._holder_of[begin:end].tolist(), rows.tolist(), strict=True)
            copied = np.concatenate([self._holders[number][row] for number, row in told])
        return copied[first - begin * self.length : last - begin * self.length]

    def whole(self) -> np.ndarray:
        """All of it, as one array."""
        return self[:]


Ids = np.ndarray | GatheredIds | GatheredRows


def gather(
    parts: list[TokenChunk], of_part: np.ndarray, places: np.ndarray, dtype: np.dtype
) -> GatheredIds | GatheredRows:
    """Samples from several runs of samples: sample i is sample ``places[i]`` of run ``of_part[i]``."""
    length = common_length(parts)
    if length and all(part.at % (length * dtype.itemsize) == 0 for part in parts):
        return GatheredRows(parts, of_part, places, length, dtype)
    return GatheredIds(parts, of_part, places, dtype)


def common_length(parts: list[TokenChunk]) -> int | None:
    """The length of all samples, where they have one."""
    lengths = {part.common_length() for part in parts if len(part.offsets) > 1}
    length = lengths.pop() if len(lengths) == 1 else 0
    return length or None


def as_array(ids: Ids) -> np.ndarray:
    return ids if isinstance(ids, np.ndarray) else ids.whole()

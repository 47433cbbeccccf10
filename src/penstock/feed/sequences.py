"""A window's pieces as sequences of one length, and any rows of them as arrays.

Labels are the next token of the same document, also over a row's end; `IGNORED_LABEL` behind a document's end, before
what is not to be learned, and in the filling. Positions count from where a piece, or its part of a row, begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.feed.gathered import GatheredRows
from penstock.feed.labels import IGNORED_LABEL, labels_of, plain_ids
from penstock.feed.pieces import Pieces
from penstock.feed.rows import BEGINS, ONLY_IDS, FieldName, end_of, picked

_GATHERED_BYTES = 256 << 10
"""A few batches gathered together cost less than one by one, and stay in the processor's cache."""


class Sequences:
    """Rows of equal length, cut out of pieces that lie end to end; the last row is filled up."""

    def __init__(self, pieces: Pieces, *, length: int, pad_id: int, masked: bool) -> None:
        self._pieces = pieces
        self._length = length
        self._pad_id = pad_id
        self._masked = masked
        self._whole = len(pieces.ids) // length

    def __len__(self) -> int:
        return (len(self._pieces.ids) + self._length - 1) // self._length

    @property
    def size_bytes(self) -> int:
        return self._pieces.size_bytes

    @property
    def is_lazy(self) -> bool:
        return not isinstance(self._pieces.ids, np.ndarray)

    def token_counts(self, rows: range) -> np.ndarray:
        filled = np.minimum(np.arange(rows.start + 1, rows.stop + 1) * self._length, len(self._pieces.ids))
        counts = filled - np.arange(rows.start, rows.stop) * self._length
        return (counts - self._filling[rows.start : rows.stop])[:: rows.step]

    def fields(self, names: tuple[FieldName, ...], rows: range | np.ndarray) -> dict[str, np.ndarray]:
        result = {"input_ids": self._input_ids(rows)} if "input_ids" in names else {}
        result["sample_ids"] = self._sample_ids(rows)
        if names == ONLY_IDS:
            return result
        if "num_tokens" in names:
            result["num_tokens"] = self.token_counts(range(len(self)))[picked(rows)]
        if not set(names) <= {"input_ids", "num_tokens"}:
            result |= self._others(names, rows)
        return result

    def id_batches(self, start: int, size: int) -> Iterator[list[dict[str, Any]]]:
        if self._masked:
            return
        sample_ids, bounds = self._ending
        at_once = max(1, _GATHERED_BYTES // (self._length * self._pieces.ids.dtype.itemsize * size)) * size
        while start + size <= self._whole:
            stop = min(start + at_once, start + (self._whole - start) // size * size)
            held = self._whole_rows(range(start, stop)).reshape(-1, size, self._length)
            before = bounds[start]
            mine = sample_ids[before : bounds[stop]].copy()  # the caller's to change: the window may be kept
            if isinstance(bounds, range):
                ended = iter(mine.reshape(-1, size))
            else:
                cuts = pairwise(bounds[start : stop + 1 : size])
                ended = (mine[first - before : last - before] for first, last in cuts)
            yield [{"input_ids": rows, "sample_ids": ids} for rows, ids in zip(held, ended, strict=True)]
            start = stop

    def _input_ids(self, rows: range | np.ndarray) -> np.ndarray:
        """A view where they are a range and none of them is filled up."""
        if end_of(rows) <= self._whole:
            return plain_ids(self._whole_rows(rows), masked=self._masked)
        numbers = np.asarray(rows)
        filled = np.full((len(numbers), self._length), self._pad_id, dtype=self._pieces.ids.dtype)
        filled[numbers < self._whole] = self._whole_rows(numbers[numbers < self._whole])
        tail = self._pieces.ids[self._whole * self._length :]
        filled[numbers == self._whole, : len(tail)] = tail
        return plain_ids(filled, masked=self._masked)

    def _whole_rows(self, rows: range | np.ndarray) -> np.ndarray:
        ids, length = self._pieces.ids, self._length
        if isinstance(ids, np.ndarray):
            return ids[: self._whole * length].reshape(-1, length)[picked(rows)]
        if isinstance(rows, range) and rows.step == 1:
            if isinstance(ids, GatheredRows) and ids.length == length:
                return ids.rows(rows.start, rows.stop)
            return ids[rows.start * length : rows.stop * length].reshape(-1, length)
        found = [ids[int(row) * length : (int(row) + 1) * length] for row in rows]
        return np.stack(found) if found else np.empty((0, length), dtype=ids.dtype)

    def _sample_ids(self, rows: range | np.ndarray) -> np.ndarray:
        """The samples whose last token stands in these rows; never the filling."""
        sample_ids, bounds = self._ending
        if isinstance(rows, range) and rows.step == 1:
            return sample_ids[bounds[rows.start] : bounds[max(rows.start, rows.stop)]].copy()
        pieces = [sample_ids[bounds[row] : bounds[row + 1]] for row in rows]
        return np.concatenate([np.empty(0, dtype=np.int64), *pieces])

    def _others(self, names: tuple[FieldName, ...], rows: range | np.ndarray) -> dict[str, np.ndarray]:
        # Worked out for all rows in between, which lie together; then the others are dropped.
        start, stop = (int(rows[0]), end_of(rows)) if len(rows) else (0, 0)
        pieces = self._pieces
        ids, offsets = pieces.ids, pieces.offsets
        first, last = start * self._length, max(start * self._length, min(stop * self._length, len(ids)))
        begin = int(np.searchsorted(offsets, first, side="right")) - 1
        end = int(np.searchsorted(offsets, last, side="left")) if len(rows) else begin
        bounds = np.clip(offsets[begin : end + 1], first, last)
        lengths = np.diff(bounds)
        made: dict[str, np.ndarray] = {}
        documents = np.repeat(pieces.documents[begin:end], lengths)
        if "labels" in names:
            labels = made["labels"] = self._blank(start, stop, IGNORED_LABEL)
            following = ids[first + 1 : last + 1]
            labels[: len(following)] = labels_of(following, masked=True) if self._masked else following
            inside = offsets[begin + 1 : end + 1] <= last
            filled = inside & (lengths > 0)
            labels[offsets[begin + 1 : end + 1][filled] - first - 1] = pieces.after[begin:end][filled]
            labels[: last - first][documents < 0] = IGNORED_LABEL
        if "position_ids" in names:
            positions = made["position_ids"] = self._blank(start, stop, 0)
            places = np.arange(first, last)
            np.subtract(places, np.repeat(offsets[begin:end], lengths), out=positions[: last - first])
            np.minimum(positions[: last - first], places % self._length, out=positions[: last - first])
            positions[: last - first][documents < 0] = 0
        if "document_ids" in names:
            made["document_ids"] = self._blank(start, stop, -1)
            made["document_ids"][: last - first] = documents
        if "attention_mask" in names:
            made["attention_mask"] = self._blank(start, stop, 0)
            made["attention_mask"][: last - first] = documents >= 0
        if "cu_seqlens" in names:
            begins = made[BEGINS] = np.zeros((stop - start) * self._length, dtype=bool)
            begins[:: self._length] = True
            begins[bounds[:-1][lengths > 0] - first] = True
            if last - first < len(begins):
                begins[last - first] = True
        kept = slice(None, None, rows.step) if isinstance(rows, range) else rows - start
        made = {name: flat.reshape(-1, self._length)[kept] for name, flat in made.items()}
        if "spans" in names:
            made["spans"] = self._spans(rows)
        return made

    def _blank(self, start: int, stop: int, value: int) -> np.ndarray:
        return np.full((stop - start) * self._length, value, dtype=np.int64)

    def _spans(self, rows: range | np.ndarray) -> np.ndarray:
        """Which tokens of which samples stand in these rows: (sample id, first, behind the last), a piece a line."""
        pieces, offsets = self._pieces, self._pieces.offsets
        found = [np.empty((0, 3), dtype=np.int64)]
        for row in rows:
            first, last = row * self._length, min((row + 1) * self._length, int(offsets[-1]))
            touched = np.arange(
                np.searchsorted(offsets, first, side="right") - 1, np.searchsorted(offsets, last, side="left")
            )
            begins = np.maximum(offsets[touched], first) - offsets[touched] + pieces.starts[touched]
            stops = np.minimum(offsets[touched + 1], last) - offsets[touched] + pieces.starts[touched]
            there = (stops > begins) & (pieces.documents[touched] >= 0)
            found.append(np.stack([pieces.sample_ids[touched], begins, stops], axis=1)[there])
        return np.concatenate(found)

    @cached_property
    def _ending(self) -> tuple[np.ndarray, Sequence[int]]:
        """The samples in the order in which they end, and how many have ended before each row: a range where every row
        is a sample."""
        pieces = self._pieces
        if isinstance(pieces.ids, GatheredRows) and pieces.ids.length == self._length:
            return pieces.sample_ids, range(len(self) + 1)
        last_row = np.maximum(pieces.offsets[1:] - 1, 0) // self._length
        in_rows = np.bincount(last_row[pieces.ends], minlength=len(self))
        return pieces.sample_ids[pieces.ends], [0, *np.cumsum(in_rows).tolist()]

    @cached_property
    def _filling(self) -> np.ndarray:
        """How much of each row is filling that lies among the pieces."""
        pieces = self._pieces
        fillings = np.flatnonzero(pieces.documents < 0)
        rows = pieces.offsets[fillings + 1] // self._length - 1  # it ends its row
        return np.bincount(rows, weights=np.diff(pieces.offsets)[fillings], minlength=len(self)).astype(np.int64)

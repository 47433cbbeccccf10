"""A window's samples as sequences of equal length, and any rows of them as arrays."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.packing import IGNORED_LABEL
from penstock.feed.windows import Window

FieldName = Literal["input_ids", "labels", "position_ids", "document_ids", "spans"]
FIELDS: tuple[FieldName, ...] = ("input_ids", "labels", "position_ids", "document_ids", "spans")


class Sequences:
    """Concatenated and cut: every token of a window stands in one row; the last row is filled up.

    Labels are the next token of the same document, also over a row's end; `IGNORED_LABEL` behind a document's end and
    in the filling. Positions count from where a document, or its continuation, begins in the row.
    """

    def __init__(self, window: Window, *, length: int, pad_id: int) -> None:
        if length < 2:
            raise ConfigError(f"sequence_length={length} leaves nothing to predict: expected 2 or more")
        self._window = window
        self._length = length
        self._pad_id = pad_id
        whole = len(window.ids) // length
        self._whole = window.ids[: whole * length].reshape(whole, length)

    def __len__(self) -> int:
        return (len(self._window.ids) + self._length - 1) // self._length

    @property
    def size_bytes(self) -> int:
        window = self._window
        return window.ids.nbytes + window.offsets.nbytes + window.sample_ids.nbytes

    def input_ids(self, start: int, stop: int, step: int = 1) -> np.ndarray:
        """Rows ``start:stop:step``; a view where none of them is filled up."""
        if stop <= len(self._whole):
            return self._whole[start:stop:step]
        rows = np.arange(start, stop, step)
        filled = np.full((len(rows), self._length), self._pad_id, dtype=self._window.ids.dtype)
        filled[rows < len(self._whole)] = self._whole[rows[rows < len(self._whole)]]
        tail = self._window.ids[len(self._whole) * self._length :]
        filled[rows == len(self._whole), : len(tail)] = tail
        return filled

    def sample_ids(self, start: int, stop: int, step: int = 1) -> np.ndarray:
        """The samples whose last token stands in rows ``start:stop:step``; never the filling."""
        bounds = self._sample_bounds
        if step == 1:
            return self._window.sample_ids[bounds[start] : bounds[stop]]
        pieces = [self._window.sample_ids[bounds[row] : bounds[row + 1]] for row in range(start, stop, step)]
        return np.concatenate([np.empty(0, dtype=np.int64), *pieces])

    def fields(self, names: tuple[FieldName, ...], start: int, stop: int, step: int = 1) -> dict[str, np.ndarray]:
        """The arrays of rows ``start:stop:step`` by name, each ``(rows, length)``."""
        result = {"input_ids": self.input_ids(start, stop, step)} if "input_ids" in names else {}
        if set(names) <= {"input_ids"}:
            return result
        if start >= stop:
            empty = np.empty((0, self._length), dtype=np.int64)
            return result | {name: empty[:, :3] if name == "spans" else empty for name in names if name not in result}
        ids, offsets = self._window.ids, self._window.offsets
        # Worked out for all rows in between, which lie together, and then only every `step`-th is kept.
        first, last = start * self._length, min(stop * self._length, len(ids))
        begin = int(np.searchsorted(offsets, first, side="right")) - 1
        end = int(np.searchsorted(offsets, last, side="left"))
        bounds = np.clip(offsets[begin : end + 1], first, last)
        lengths = np.diff(bounds)
        if "labels" in names:
            labels = self._blank(start, stop, IGNORED_LABEL)
            following = ids[first + 1 : last + 1]
            labels[: len(following)] = following
            labels[offsets[begin + 1 : end + 1][offsets[begin + 1 : end + 1] <= last] - first - 1] = IGNORED_LABEL
            result["labels"] = labels.reshape(-1, self._length)[::step]
        if "position_ids" in names:
            positions = self._blank(start, stop, 0)
            places = np.arange(first, last)
            np.subtract(places, np.repeat(offsets[begin:end], lengths), out=positions[: last - first])
            np.minimum(positions[: last - first], places % self._length, out=positions[: last - first])
            result["position_ids"] = positions.reshape(-1, self._length)[::step]
        if "document_ids" in names:
            documents = self._blank(start, stop, -1)
            documents[: last - first] = np.repeat(np.arange(begin, end), lengths)
            result["document_ids"] = documents.reshape(-1, self._length)[::step]
        if "spans" in names:
            result["spans"] = self._spans(range(start, stop, step))
        return result

    def _blank(self, start: int, stop: int, value: int) -> np.ndarray:
        return np.full((stop - start) * self._length, value, dtype=np.int64)

    def _spans(self, rows: range) -> np.ndarray:
        """Which tokens of which samples stand in these rows: (sample id, first, behind the last), a piece a line."""
        offsets = self._window.offsets
        pieces = [np.empty((0, 3), dtype=np.int64)]
        for row in rows:
            first, last = row * self._length, min((row + 1) * self._length, int(offsets[-1]))
            touched = np.arange(
                np.searchsorted(offsets, first, side="right") - 1, np.searchsorted(offsets, last, side="left")
            )
            starts = np.maximum(offsets[touched], first) - offsets[touched]
            stops = np.minimum(offsets[touched + 1], last) - offsets[touched]
            pieces.append(np.stack([self._window.sample_ids[touched], starts, stops], axis=1)[stops > starts])
        return np.concatenate(pieces)

    @cached_property
    def _sample_bounds(self) -> np.ndarray:
        """How many samples have ended before each row."""
        last_row = np.maximum(self._window.offsets[1:] - 1, 0) // self._length
        return np.searchsorted(last_row, np.arange(len(self) + 1), side="left")

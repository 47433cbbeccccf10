"""Pieces: which part of which document stands where, before rows are cut. Pure functions of a window.

    concatenate    documents end to end, rows cut out of them wherever they fall: nothing is wasted
    best-fit       documents whole, several a row, each where it leaves least room; long ones in row-long parts
    pad, ragged    a document a row; long ones in row-long parts

In all of them every token of the window stands in one piece, and every piece in one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.gathered import Ids, as_array
from penstock.feed.gathering import reorder
from penstock.feed.labels import IGNORED_LABEL, labels_of
from penstock.feed.token_store import TokenChunk
from penstock.feed.windows import Window

Packing = Literal["concatenate", "best-fit", "pad", "ragged"]
PACKINGS: tuple[Packing, ...] = ("concatenate", "best-fit", "pad", "ragged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Pieces of documents end to end; piece i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Ids
    offsets: np.ndarray
    sample_ids: np.ndarray
    documents: np.ndarray
    """Which document of the window each piece is of; -1 for filling."""
    starts: np.ndarray
    """Where in its document each piece begins."""
    ends: np.ndarray
    """Whether the document ends with the piece."""
    after: np.ndarray
    """The label of a piece's last token: what follows it in its document, or `IGNORED_LABEL`."""

    @property
    def size_bytes(self) -> int:
        held = (self.ids, self.offsets, self.sample_ids, self.documents, self.starts, self.ends, self.after)
        return sum(array.nbytes for array in held)


def whole_documents(window: Window) -> Pieces:
    """A piece a document."""
    count = len(window.sample_ids)
    return Pieces(
        ids=window.ids,
        offsets=window.offsets,
        sample_ids=window.sample_ids,
        documents=np.arange(count),
        starts=np.zeros(count, dtype=np.int64),
        ends=np.ones(count, dtype=bool),
        after=np.full(count, IGNORED_LABEL, dtype=np.int64),
    )


def row_long_parts(window: Window, length: int, *, masked: bool = False) -> Pieces:
    """Documents cut at every `length`-th of their tokens; in order, and lying as they did."""
    ids = as_array(window.ids)
    lengths = np.diff(window.offsets)
    counts = np.maximum(1, -(-lengths // length))
    documents = np.repeat(np.arange(len(counts)), counts)
    part = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = window.offsets[documents] + part * length
    offsets = np.append(begins, window.offsets[-1:])
    ends = part == counts[documents] - 1
    after = np.full(len(documents), IGNORED_LABEL, dtype=np.int64)
    after[~ends] = labels_of(ids[offsets[1:][~ends]], masked=masked)
    return Pieces(
        ids=ids,
        offsets=offsets,
        sample_ids=window.sample_ids[documents],
        documents=documents,
        starts=part * length,
        ends=ends,
        after=after,
    )


def fit(window: Window, length: int, pad_id: int, packing: Packing, *, masked: bool = False) -> Pieces:
    """Pieces laid into rows of `length` tokens, each row filled up: so rows are cut where rows begin."""
    parts = row_long_parts(window, length, masked=masked)
    lengths = np.diff(parts.offsets)
    rows = best_fit(lengths, length) if packing == "best-fit" else _row_each(lengths)
    row_count = int(rows.max(initial=-1)) + 1
    order = np.argsort(rows, kind="stable")  # within a row in the plan's order
    order = order[rows[order] >= 0]
    placed = reorder(TokenChunk(as_array(parts.ids), parts.offsets), order)
    used = np.bincount(rows[order], weights=lengths[order], minlength=row_count).astype(np.int64)
    ids = np.full((row_count, length), pad_id, dtype=window.ids.dtype)
    ids[np.arange(length) < used[:, None]] = placed.ids
    # A filling behind each row's pieces, also where it is empty: numbers stay simple, and nothing sees an empty one.
    at = np.cumsum(np.bincount(rows[order], minlength=row_count))
    return Pieces(
        ids=ids.reshape(-1),
        offsets=np.concatenate([[0], np.cumsum(np.insert(lengths[order], at, length - used))]),
        sample_ids=np.insert(parts.sample_ids[order], at, -1),
        documents=np.insert(parts.documents[order], at, -1),
        starts=np.insert(parts.starts[order], at, 0),
        ends=np.insert(parts.ends[order], at, False),
        after=np.insert(parts.after[order], at, IGNORED_LABEL),
    )


def count_rows(lengths: np.ndarray, length: int, packing: Packing) -> int:
    """How many rows documents of these lengths make."""
    if packing == "concatenate":
        return -(-int(lengths.sum()) // length)
    whole, rest = np.divmod(lengths, length)
    rest = rest[rest > 0]
    if packing == "best-fit":
        return int(whole.sum()) + int(best_fit(rest, length).max(initial=-1)) + 1
    return int(whole.sum()) + len(rest)


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each piece: the longest first, each where it leaves least room.

    Pieces of one length go together, and so do rows with the same room left: the work grows with the number of
    different lengths, not of pieces. Rows are numbered by the first piece put into each, in the order given, so that
    a shuffled order stays one. An empty piece goes with the one before it; it has no row where all are empty.
    """
    if len(lengths) and lengths.max() > room:
        raise ConfigError(f"a piece of {lengths.max()} tokens does not fit a row of {room}")
    by_length = np.argsort(-lengths, kind="stable")
    by_length = by_length[: int((lengths > 0).sum())]
    sizes, firsts, counts = np.unique(-lengths[by_length], return_index=True, return_counts=True)
    chosen = np.empty(len(by_length), dtype=np.int64)
    left: dict[int, list[np.ndarray]] = {}
    rooms = 0  # bit r: there are rows with room for r tokens
    row_count = 0
    for size, first, count in zip((-sizes).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        place, stop = first, first + count
        while place < stop:
            fitting = rooms >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                rooms ^= 1 << space
                rows = np.concatenate(left.pop(space))
            else:
                space = room
                rows = row_count + np.arange(-(-(stop - place) // (room // size)))
                row_count += len(rows)
            each = space // size
            full = min((stop - place) // each, len(rows))
            rest = stop - place - full * each if full < len(rows) else 0  # for one more row, which they do not fill
            chosen[place : place + full * each] = np.repeat(rows[:full], each)
            chosen[place + full * each : place + full * each + rest] = rows[full : full + bool(rest)]
            place += full * each + rest
            begun = full + bool(rest)
            for remaining, some in (
                (space - each * size, rows[:full]),
                (space - rest * size, rows[full:begun]),
                (space, rows[begun:]),
            ):
                if remaining and len(some):
                    left.setdefault(remaining, []).append(some)
                    rooms |= 1 << remaining
    _, opened_by = np.unique(chosen, return_index=True)
    renumbered = np.empty(row_count, dtype=np.int64)
    renumbered[np.argsort(by_length[opened_by])] = np.arange(row_count)
    result = np.full(len(lengths), -1, dtype=np.int64)
    result[by_length] = renumbered[chosen]
    return _with_empty(result, lengths)


def _row_each(lengths: np.ndarray) -> np.ndarray:
    rows = np.full(len(lengths), -1, dtype=np.int64)
    rows[lengths > 0] = np.arange(int((lengths > 0).sum()))
    return _with_empty(rows, lengths)


def _with_empty(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Give each empty piece the row of the last piece before it that has one, or of the first that has."""
    filled = np.flatnonzero(lengths > 0)
    if not len(filled) or len(filled) == len(lengths):
        return rows
    before = np.searchsorted(filled, np.arange(len(lengths)), side="right") - 1
    return rows[filled[np.maximum(before, 0)]]

"""Packing: documents of one window, end to end, cut into sequences. A pure function of the window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.labels import IGNORED_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences to learn from in one step.

    Every token of the window stands in exactly one sequence. `labels` hold the token that follows, also over a
    sequence's end, never over a document's: so every token but a document's first is learned once, its end included.
    """

    input_ids: np.ndarray
    """``(sequences, length)``, int64; the last sequence of a window is filled up with end of text."""
    labels: np.ndarray
    """``(sequences, length)``, the next token or `IGNORED_LABEL`."""
    position_ids: np.ndarray
    """``(sequences, length)``, counted from where the document, or its continuation, starts in the sequence."""
    document_ids: np.ndarray
    """``(sequences, length)``, which document of the window a token belongs to; -1 for padding."""
    sample_ids: np.ndarray
    """Ids of the samples whose last token is in this batch; never padding."""
    spans: np.ndarray
    """``(pieces, 3)``: sample id, first and last-but-one token of it that stand in this batch."""
    start_offset: int
    """Sequences of the window before this batch."""
    stop_offset: int
    samples_done: int
    """Samples of the window whose last token lies in this batch or before it."""

    @property
    def num_tokens(self) -> int:
        """Tokens learned from: places with a label."""
        return int((self.labels != IGNORED_LABEL).sum())


_ARRAYS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """A window cut into sequences of equal length."""

    ids: np.ndarray
    offsets: np.ndarray
    first_sample_id: int
    sequence_length: int
    pad_id: int
    excluded: np.ndarray | None = None
    """Which documents only keep their place: they have no tokens and are not told of."""

    @property
    def sequence_count(self) -> int:
        return -(-len(self.ids) // self.sequence_length)

    def batches(self, batch_size: int, start_offset: int = 0) -> Iterator[Batch]:
        """Batches of `batch_size` sequences from a sequence offset on; the last may be short."""
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} holds no sequence: expected 1 or more")
        for start in range(start_offset, self.sequence_count, batch_size):
            yield self.batch(start, min(start + batch_size, self.sequence_count))

    def samples_of(self, start: int, stop: int) -> np.ndarray:
        """The samples of which some token stands in sequences ``[start, stop)``."""
        first, last = start * self.sequence_length, min(stop * self.sequence_length, len(self.ids))
        places = np.searchsorted(self.offsets, [first, last - 1], side="right") - 1
        return self.first_sample_id + self._learned(np.arange(places[0], places[1] + 1))

    def share(self, start: int, stop: int, rank: int, world: int) -> Batch:
        """What one rank gets of the batch of sequences ``[start, stop)``: ``[rank::world]`` of them, perhaps none.

        Samples belong to the rank that has their last token. How far the window is learned is told of the whole batch.
        """
        rows = [self.batch(row, row + 1) for row in range(start + rank, stop, world)]
        done = self._samples_done(min(stop * self.sequence_length, len(self.ids)))
        if not rows:
            empty = np.empty((0, self.sequence_length), dtype=np.int64)
            return Batch(
                input_ids=empty,
                labels=empty,
                position_ids=empty,
                document_ids=empty,
                sample_ids=np.empty(0, dtype=np.int64),
                spans=np.empty((0, 3), dtype=np.int64),
                samples_done=done,
                start_offset=start,
                stop_offset=stop,
            )
        names = (*_ARRAYS, "sample_ids", "spans")
        arrays = {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
        return Batch(**arrays, samples_done=done, start_offset=start, stop_offset=stop)

    def batch(self, start: int, stop: int) -> Batch:
        """Sequences ``[start, stop)``."""
        length = self.sequence_length
        first, last = start * length, min(stop * length, len(self.ids))
        ids = self.ids[first:last].astype(np.int64)  # a copy: what a batch's owner does to it stays with the batch
        places = np.arange(first, last)
        document = np.searchsorted(self.offsets, places, side="right") - 1
        begins = np.maximum(self.offsets[document], places - places % length)
        labels = np.full(last - first, IGNORED_LABEL, dtype=np.int64)
        following = self.ids[first + 1 : last + 1]
        inside = places[: len(following)] + 1 < self.offsets[document[: len(following)] + 1]
        labels[: len(following)][inside] = following[inside]
        done_before, done = (self._samples_done(place) for place in (first, last))
        return Batch(
            input_ids=self._rows(ids, self.pad_id, stop - start),
            labels=self._rows(labels, IGNORED_LABEL, stop - start),
            position_ids=self._rows(places - begins, 0, stop - start),
            document_ids=self._rows(document, -1, stop - start),
            sample_ids=self.first_sample_id + self._learned(np.arange(done_before, done)),
            spans=self._spans(first, last, document),
            start_offset=start,
            stop_offset=stop,
            samples_done=done,
        )

    def _samples_done(self, place: int) -> int:
        """Documents that end at a place or before it; at the window's start not even an empty one has."""
        return int(np.searchsorted(self.offsets[1:], place, side="right")) if place else 0

    def _learned(self, documents: np.ndarray) -> np.ndarray:
        """Those that are not excluded."""
        return documents if self.excluded is None else documents[~self.excluded[documents]]

    def _rows(self, flat: np.ndarray, fill: int, rows: int) -> np.ndarray:
        missing = rows * self.sequence_length - len(flat)
        if missing:
            flat = np.concatenate([flat, np.full(missing, fill, dtype=flat.dtype)])
        return flat.reshape(rows, self.sequence_length)

    def _spans(self, first: int, last: int, document: np.ndarray) -> np.ndarray:
        touched = self._learned(np.arange(document[0], document[-1] + 1))
        starts = np.maximum(self.offsets[touched], first) - self.offsets[touched]
        stops = np.minimum(self.offsets[touched + 1], last) - self.offsets[touched]
        return np.stack([self.first_sample_id + touched, starts, stops], axis=1)


def pack_window(
    ids: np.ndarray,
    offsets: np.ndarray,
    *,
    first_sample_id: int,
    sequence_length: int,
    pad_id: int,
    excluded: np.ndarray | None = None,
) -> PackedWindow:
    """Concatenate and cut: documents longer than a sequence go on in the next one, nothing is cut off.

    Args:
        ids: Token ids of all documents, end to end.
        offsets: Where each document starts, and the end of the last.
        first_sample_id: Id of the sample that the first document is; the others follow.
        sequence_length: Tokens a sequence.
        pad_id: Fills up the last sequence.
        excluded: Which documents are not to be learned; they have no tokens here.
    """
    if sequence_length < 2:
        raise ConfigError(f"sequence_length={sequence_length} leaves nothing to predict: expected 2 or more")
    return PackedWindow(ids, offsets, first_sample_id, sequence_length, pad_id, excluded)

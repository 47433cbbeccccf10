"""A data set's draws, epoch after epoch: what a mixture takes from it, any number at a time, from any place on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.packed_epoch import NotTokenised
from penstock.feed.rows import Rows
from penstock.feed.source_feed import SourceFeed
from penstock.feed.state import ExclusionEntry, StreamPlace
from penstock.plans.strided import Exclusion, StridedEpoch


class Taken(NamedTuple):
    """Draws that lie together: samples, or rows of a window."""

    sample_ids: np.ndarray | None
    rows: Rows | None
    start: int
    stop: int


class Stream(Protocol):
    """The draws of one data set."""

    def draw_count(self, epoch: int) -> int:
        """How many there are in one of its epochs."""
        ...

    def place(self, epoch: int, draws: int) -> StreamPlace:
        """Where so many draws of an epoch have been taken."""
        ...

    def take(self, place: StreamPlace, count: int) -> tuple[list[Taken], StreamPlace]:
        """The next draws, and where the ones behind them are."""
        ...


class TextStream:
    """Samples in their order."""

    def __init__(self, source: SourceFeed, exclusions: list[ExclusionEntry]) -> None:
        self._source = source
        self._exclusions = exclusions
        self._kept: tuple[int, StridedEpoch] | None = None

    def draw_count(self, epoch: int) -> int:
        return self._epoch(epoch).batch_count

    def place(self, epoch: int, draws: int) -> StreamPlace:
        return StreamPlace(epoch=epoch, offset=draws)

    def take(self, place: StreamPlace, count: int) -> tuple[list[Taken], StreamPlace]:
        taken: list[Taken] = []
        epoch, offset = place.epoch, place.offset
        while count:
            total = _draws_of(self, epoch, self._source)
            stop = min(offset + count, total)
            ids = self._epoch(epoch).sample_ids(offset, stop)
            taken.append(Taken(ids, None, 0, len(ids)))
            count -= stop - offset
            epoch, offset = (epoch + 1, 0) if stop == total else (epoch, stop)
        draws = place.draws + sum(piece.stop - piece.start for piece in taken)
        return taken, place._replace(epoch=epoch, offset=offset, draws=draws)

    def _epoch(self, epoch: int) -> StridedEpoch:
        if self._kept is None or self._kept[0] != epoch:
            exclusions = [
                Exclusion(entry.step if entry.epoch == epoch else 0, entry.sample_ids)
                for entry in self._exclusions
                if entry.epoch <= epoch
            ]
            self._kept = epoch, StridedEpoch(self._source.order(epoch), 1, exclusions=exclusions)
        return self._kept[1]


class PackedStream:
    """Rows of its windows in their order."""

    def __init__(self, source: SourceFeed, exclusions: list[ExclusionEntry]) -> None:
        self._source = source
        self._exclusions = exclusions

    def draw_count(self, epoch: int) -> int:
        return int(self._starts(epoch)[-1])

    def _starts(self, epoch: int) -> np.ndarray:
        try:
            return self._source.packed_epoch(epoch, self._exclusions).sequence_starts
        except NotTokenised as error:
            raise ConfigError(
                f"data set {self._source.source!r} is mixed by the number of its sequences, and {error.missing} of it "
                f"are not tokenised: run `penstock tokenize {self._source.blocks.dataset_path}` with this tokenizer "
                "first, or mix by weights and give steps_per_epoch"
            ) from error

    def place(self, epoch: int, draws: int) -> StreamPlace:
        starts = self._starts(epoch)
        window = int(np.searchsorted(starts, draws, side="right")) - 1
        return StreamPlace(epoch=epoch, window=window, offset=draws - int(starts[window]))

    def take(self, place: StreamPlace, count: int) -> tuple[list[Taken], StreamPlace]:
        taken: list[Taken] = []
        epoch, window, offset, tokens = place.epoch, place.window, place.offset, place.tokens
        empty = 0
        while count:
            packed = self._source.packed_epoch(epoch, self._exclusions)
            made = packed.kept_rows(window)
            stop = min(offset + count, len(made))
            if stop > offset:
                taken.append(Taken(None, made, offset, stop))
                tokens += int(made.token_counts(range(offset, stop)).sum())
            empty = 0 if len(made) else empty + 1
            if empty > 2 * packed.window_count:  # what there is may come first in one epoch and last in the next
                raise ConfigError(f"data set {self._source.source!r} has nothing to draw: leave it out of the mix")
            count -= stop - offset
            offset = stop
            if offset == len(made):
                window, offset = window + 1, 0
            if window >= packed.window_count:
                epoch, window = epoch + 1, 0
        draws = place.draws + sum(piece.stop - piece.start for piece in taken)
        return taken, StreamPlace(epoch, window, offset, draws, tokens)


def make_stream(source: SourceFeed, exclusions: list[ExclusionEntry]) -> Stream:
    return (PackedStream if source.packed else TextStream)(source, exclusions)


def locate(stream: Stream, source: SourceFeed, epoch: int, draws: int) -> StreamPlace:
    """Where so many draws have been taken since the beginning of an epoch; it may be in a later one."""
    while draws >= (total := _draws_of(stream, epoch, source)):
        epoch, draws = epoch + 1, draws - total
    return stream.place(epoch, draws)


def _draws_of(stream: Stream, epoch: int, source: SourceFeed) -> int:
    total = stream.draw_count(epoch)
    if not total:
        raise ConfigError(f"data set {source.source!r} has nothing to draw: leave it out of the mix")
    return total

"""The batches of one data set: texts, or packed sequences; what a loader asks of any feed is here too."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.packed_epoch import PackedEpoch
from penstock.feed.source_feed import SourceFeed
from penstock.feed.state import ExclusionEntry, LoaderState
from penstock.feed.steps import Batch, Steps
from penstock.feed.text_epoch import TextEpoch

_log = logging.getLogger(__name__)


class Feed(Protocol):
    """What a loader is fed by. Knows no rank and no position: those come with every call."""

    is_mixed: bool

    @property
    def sources(self) -> list[SourceFeed]: ...

    def shape(self) -> dict[str, Any]:
        """Everything that makes the batches what they are, but for their size."""
        ...

    def begin(self, state: LoaderState, epoch: int, batch_size: int) -> LoaderState:
        """The state at the beginning of an epoch."""
        ...

    def following(self, state: LoaderState) -> LoaderState:
        """The state behind the end of its epoch."""
        ...

    def steps(self, state: LoaderState, batch_size: int, rank: int, world: int) -> Generator[Steps, None, None]:
        """The batches from where a state stands to the end of its epoch."""
        ...

    def at(self, state: LoaderState, k: int, batch_size: int) -> LoaderState:
        """The state before batch k of a state's epoch."""
        ...

    def batch(self, state: LoaderState, k: int, batch_size: int, rank: int, world: int) -> Batch:
        """Batch k of a state's epoch, wherever in it the state stands."""
        ...

    def batch_count(self, state: LoaderState, batch_size: int) -> int:
        """Batches of a state's epoch, the same for every rank."""
        ...

    def exclusion(
        self, state: LoaderState, sample_ids: np.ndarray, source: str | None, *, at_once: bool
    ) -> ExclusionEntry:
        """An entry of the exclusion journal, for where a state stands."""
        ...

    def refuse_resize(self) -> None:
        """Raise where the batch size cannot change on the way."""
        ...

    def report(self, state: LoaderState, batch_size: int) -> list[dict[str, Any]]:
        """What each data set of a mixture has given, against what it was to give."""
        ...

    def report_timings(self) -> dict[str, float]:
        """How long the consumer waited, and what the feed did meanwhile."""
        ...


class PlainFeed:
    """Batches of one data set."""

    is_mixed = False

    def __init__(self, source: SourceFeed, *, drop_last: bool, prefetch_bytes: int) -> None:
        self._source = source
        self._drop_last = drop_last
        self._prefetch_bytes = prefetch_bytes

    @property
    def sources(self) -> list[SourceFeed]:
        return [self._source]

    def shape(self) -> dict[str, Any]:
        return self._source.data_shape() | self._source.settings_shape() | {"drop_last": self._drop_last}

    def begin(self, state: LoaderState, epoch: int, batch_size: int) -> LoaderState:
        return replace(state, epoch=epoch, step=0, window=0, offset=0, batch_sizes=())

    def following(self, state: LoaderState) -> LoaderState:
        return self.begin(state, state.epoch + 1, 0)

    def steps(self, state: LoaderState, batch_size: int, rank: int, world: int) -> Generator[Steps, None, None]:
        if self._source.packed:
            packed = self._packed(state)
            return packed.steps(state, batch_size, rank, world, drop_last=self._drop_last)
        return self._texts(state, batch_size).steps_ahead(state.step, rank, world, self._prefetch_bytes)

    def at(self, state: LoaderState, k: int, batch_size: int) -> LoaderState:
        if not self._source.packed:
            return replace(state, step=k)
        window, offset = self._numbered(state).place(k * batch_size)
        return replace(state, step=k, window=window, offset=offset)

    def batch(self, state: LoaderState, k: int, batch_size: int, rank: int, world: int) -> Batch:
        if self._source.packed:
            return self._numbered(state).batch(k, batch_size, rank, world)
        return self._texts(state, batch_size).batch(k, rank, world)

    def batch_count(self, state: LoaderState, batch_size: int) -> int:
        if self._source.packed:
            return self._numbered(state).batch_count(batch_size, drop_last=self._drop_last)
        return self._texts(state, batch_size).batch_count

    def exclusion(
        self, state: LoaderState, sample_ids: np.ndarray, source: str | None, *, at_once: bool
    ) -> ExclusionEntry:
        if source is not None:
            raise ConfigError(f"source={source!r} names a data set of a mixture, and this loader has one data set")
        window = (state.window + bool(state.offset)) if at_once else 0
        if at_once and self._source.packed and window >= self._packed(state).window_count:
            _log.warning(
                "the last window of epoch %d is under way, and packed: %d excluded samples may still come in it",
                state.epoch,
                len(sample_ids),
            )
        return ExclusionEntry(
            epoch=state.epoch if at_once else state.epoch + 1,
            step=state.step if at_once else 0,
            window=window,
            sample_ids=sample_ids,
        )

    def refuse_resize(self) -> None:
        """Never: samples go on with the next one, and so do sequences."""

    def report(self, state: LoaderState, batch_size: int) -> list[dict[str, Any]]:
        raise ConfigError("this loader has one data set: only a mix has shares to tell of")

    def report_timings(self) -> dict[str, float]:
        return self._source.report_to.report()

    def _texts(self, state: LoaderState, batch_size: int) -> TextEpoch:
        source = self._source
        return TextEpoch(
            source.reader(),
            source.order(state.epoch),
            state.batch_sizes[0][1] if state.batch_sizes else batch_size,
            state=state,
            drop_last=self._drop_last,
            timings=source.timings,
        )

    def _numbered(self, state: LoaderState) -> PackedEpoch:
        if state.batch_sizes:
            raise ConfigError(
                "the batch size changed in the middle of this epoch, and packed batches have no numbers until the "
                "next: iterate to its end"
            )
        return self._packed(state)

    def _packed(self, state: LoaderState) -> PackedEpoch:
        return self._source.packed_epoch(state.epoch, list(state.exclusions))

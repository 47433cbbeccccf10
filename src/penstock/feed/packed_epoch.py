"""One epoch of packed sequences: windows in the plan's order, cut into rows, dealt as global batches."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.laying import make_rows
from penstock.feed.pieces import Packing, count_rows
from penstock.feed.prefetch import Prefetch
from penstock.feed.rows import ONLY_IDS, FieldName, Rows, merge
from penstock.feed.state import ExclusionEntry, LoaderState
from penstock.feed.steps import PackedSteps, Step, Steps
from penstock.feed.token_cache import TokenCache
from penstock.feed.windows import WindowPlan
from penstock.plans.orders import Order, Sequential, ShardLocal

_WINDOWS_AHEAD_BYTES = 64 << 20


class NotTokenised(ConfigError):
    """Sequences were to be counted before all of them are there."""

    missing = "some chunks"


class LastWindow:
    """The window used last: whoever asks for one batch by its number asks for its neighbours next. The one before it is
    let go of with the next: a batch may have rows of both."""

    def __init__(self) -> None:
        self._kept: tuple[PackedEpoch, int, Rows] | None = None
        self._before: tuple[PackedEpoch, int] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return LastWindow, ()

    def get(self, epoch: PackedEpoch, window: int) -> Rows:
        kept = self._kept
        if kept is None or kept[0] is not epoch or kept[1] != window:
            made = epoch.rows(window)
            if self._before is not None:
                self._before[0].let_go(self._before[1])
            self._before = kept and kept[:2]
            kept = self._kept = epoch, window, made
        return kept[2]


class PackedEpoch:
    """Batches of one epoch, as arrays of ids. Global batch k is sequences ``[kB, (k+1)B)`` of its windows in order."""

    def __init__(
        self,
        cache: TokenCache,
        order: Order,
        *,
        epoch: int,
        exclusions: list[ExclusionEntry],
        window_samples: int,
        packing: Packing,
        sequence_length: int,
        pad_id: int,
        fields: tuple[FieldName, ...],
        last_window: LastWindow,
    ) -> None:
        self._cache = cache
        self._order = order
        self._window_samples = window_samples
        self._packing: Packing = packing
        self._length = sequence_length
        self._pad_id = pad_id
        self._fields = fields
        self._last_window = last_window
        self._exclusions = [
            (entry.window if entry.epoch == epoch else 0, entry.sample_ids)
            for entry in exclusions
            if entry.epoch <= epoch
        ]

    def steps(
        self, state: LoaderState, batch_size: int, rank: int, world: int, *, drop_last: bool
    ) -> Generator[Steps, None, None]:
        """The epoch's batches from where a state stands. Windows are made ahead, in a thread; but for those that take
        no work: two threads of one interpreter would only be in each other's way."""
        if self._cache.at_hand and state.window < self.window_count and self.kept_rows(state.window).is_lazy:
            yield from self._deal(self._at_hand(state.window), state, batch_size, rank, world, drop_last=drop_last)
            return
        sequences = Prefetch(
            self._sequences(state.window),
            budget_bytes=_WINDOWS_AHEAD_BYTES,
            size_of=lambda made: made.size_bytes,
            on_wait=self._cache.timings.waited,
        )
        try:
            windows = self._used_up(iter(sequences), state.window)
            yield from self._deal(windows, state, batch_size, rank, world, drop_last=drop_last)
        finally:
            sequences.close()

    def let_go(self, window: int) -> None:
        """A window was used, and is no longer needed."""
        again = not isinstance(self._order, ShardLocal | Sequential)  # then every window has samples of all chunks
        self._cache.let_go(self._chunks_of(window), again=again)

    def _used_up(self, windows: Iterator[Rows], first: int) -> Iterator[Rows]:
        for window, made in enumerate(windows, start=first):
            yield made
            if window > first:
                self.let_go(window - 1)

    def _chunks_of(self, window: int) -> np.ndarray:
        """The chunks that a window's samples are in."""
        if isinstance(self._order, ShardLocal):
            return self._order.window_chunk_ids(window)
        size = self._cache.chunk_size
        if isinstance(self._order, Sequential):
            first, stop = window * self._window_samples, (window + 1) * self._window_samples
            return np.arange(first // size, min(-(-stop // size), self._cache.chunk_count))
        return np.unique(self._plan(window).sample_ids(window) // size)

    def _at_hand(self, first: int) -> Iterator[Rows]:
        for window in range(first, self.window_count):
            began = time.perf_counter()
            made = self.kept_rows(window)
            if window + 1 < self.window_count:
                self._cache.will_need(partial(self._chunks_of, window + 1))
            self._cache.timings.waited(time.perf_counter() - began)
            yield made

    def _deal(
        self,
        windows: Iterator[Rows],
        state: LoaderState,
        batch_size: int,
        rank: int,
        world: int,
        *,
        drop_last: bool,
    ) -> Iterator[Steps]:
        step, window, offset = state.step, state.window, state.offset
        hasty = world == 1 and self._fields == ONLY_IDS
        pieces: list[tuple[Rows, int, int]] = []
        wanted = batch_size
        for made in windows:
            count = len(made)
            while offset < count:
                if hasty and not pieces:
                    for batches in made.id_batches(offset, batch_size):  # what follows, for the usual case
                        yield PackedSteps(batches, step, window, offset, batch_size, count)
                        offset, step = offset + len(batches) * batch_size, step + len(batches)
                    if offset == count:
                        break
                stop = min(offset + wanted, count)
                pieces.append((made, offset, stop))
                wanted -= stop - offset
                offset = stop
                if not wanted:
                    batch = self._batch(pieces, rank, world)
                    yield PackedSteps([batch], step, window, offset - batch_size, batch_size, count)
                    step, pieces, wanted = step + 1, [], batch_size
            window, offset = window + 1, 0
        if pieces and not drop_last:
            yield Step(self._batch(pieces, rank, world), 0, {"step": step + 1, "window": window, "offset": 0})

    def _batch(self, pieces: list[tuple[Rows, int, int]], rank: int, world: int) -> dict[str, Any]:
        """One rank's share of a global batch: its rows ``[rank::world]``, from one window or several."""
        shares = []
        taken = 0
        for made, start, stop in pieces:
            first = min(stop, start + (rank - taken) % world)
            shares.append(made.fields(self._fields, range(first, stop, world)))
            taken += stop - start
        return merge(shares)

    # -- windows -------------------------------------------------------------------------------------------------------

    def _plan(self, window: int) -> WindowPlan:
        chosen = [ids for first, ids in self._exclusions if first <= window]
        excluded = np.unique(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)
        return WindowPlan(order=self._order, window_samples=self._window_samples, excluded=excluded)

    @property
    def window_count(self) -> int:
        return self._plan(0).window_count

    def _sequences(self, first: int) -> Iterator[Rows]:
        for window in range(first, self.window_count):
            yield self.rows(window)

    def rows(self, window: int) -> Rows:
        """The sequences of a window."""
        read = self._plan(window).read(window, self._cache)
        with self._cache.timings.of("pack"):
            return make_rows(read, self._packing, length=self._length, pad_id=self._pad_id, masked=self._cache.masked)

    def kept_rows(self, window: int) -> Rows:
        """The sequences of a window; the last one is kept."""
        return self._last_window.get(self, window)

    # -- what was handed out -------------------------------------------------------------------------------------------

    def samples_between(self, start: tuple[int, int], stop: tuple[int, int]) -> Iterator[np.ndarray]:
        """The samples that end between two places (window, sequence of it), some at a time.

        Whole windows are arithmetic; only of one that is cut are tokens needed, to know which sample ends where.
        """
        (window, offset), (last, last_offset) = start, stop
        while window < last or (window == last and offset < last_offset):
            if offset or window == last:
                made = self.rows(window)
                end = last_offset if window == last else len(made)
                yield made.fields(ONLY_IDS, range(offset, end))["sample_ids"]
            else:
                yield self._plan(window).sample_ids(window)
            window, offset = window + 1, 0

    def sequences_between(self, start: tuple[int, int], stop: tuple[int, int]) -> int:
        """How many sequences lie between two places; makes the windows for it."""
        (window, offset), (last, last_offset) = start, stop
        return sum(len(self.rows(each)) for each in range(window, last)) - offset + last_offset

    # -- by number -----------------------------------------------------------------------------------------------------

    def batch_count(self, batch_size: int, *, drop_last: bool) -> int:
        total = int(self.sequence_starts[-1])
        return total // batch_size if drop_last else -(-total // batch_size)

    def batch(self, k: int, batch_size: int, rank: int, world: int) -> dict[str, Any]:
        """Batch k: finds its windows by the counts of the token cache, and makes them."""
        starts = self.sequence_starts
        first, last = k * batch_size, min((k + 1) * batch_size, int(starts[-1]))
        window = int(np.searchsorted(starts, first, side="right")) - 1
        pieces = []
        while first < last:
            stop = min(last, int(starts[window + 1]))
            if stop > first:
                begin = int(starts[window])
                pieces.append((self.kept_rows(window), first - begin, stop - begin))
                first = stop
            window += 1
        batch = self._batch(pieces, rank, world)
        return {name: np.array(array) for name, array in batch.items()}  # the caller's own: the window is kept

    def place(self, sequence: int) -> tuple[int, int]:
        """The window in which a sequence of the epoch stands, and its place there; behind the last, the next window."""
        starts = self.sequence_starts
        sequence = min(sequence, int(starts[-1]))
        window = int(np.searchsorted(starts, sequence, side="right")) - 1
        return window, sequence - int(starts[window])

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """How many sequences come before each window, and in all; from the counts of the token cache."""
        of_chunks = self._cache.token_counts()
        missing = int((of_chunks < 0).sum())
        if missing:
            error = NotTokenised(
                f"the number of sequences is known once all is tokenised, and {missing} of {len(of_chunks)} chunks are "
                "not: run `penstock tokenize`, or iterate over the loader itself, which needs no numbers"
            )
            error.missing = f"{missing} of {len(of_chunks)} chunks"
            raise error
        sequences = [self._row_count(window, of_chunks) for window in range(self.window_count)]
        return np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])

    def _row_count(self, window: int, of_chunks: np.ndarray) -> int:
        """Rows of a window: by its chunks' counts where these say it, else by its samples' lengths."""
        plan = self._plan(window)
        if self._packing == "concatenate" and isinstance(self._order, ShardLocal) and not len(plan.excluded):
            return -(-int(of_chunks[self._order.window_chunk_ids(window)].sum()) // self._length)
        sample_ids = plan.sample_ids(window)
        numbers, places = np.divmod(sample_ids, self._cache.chunk_size)
        lengths = np.empty(len(sample_ids), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            lengths[mine] = np.diff(self._cache.chunks([number])[0].offsets)[places[mine]]
        return count_rows(lengths, self._length, self._packing)

"""One epoch of packed sequences: windows in the plan's order, cut into rows, dealt as global batches."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.prefetch import Prefetch
from penstock.feed.sequences import FieldName, Sequences
from penstock.feed.state import LoaderState
from penstock.feed.text_epoch import Step
from penstock.feed.token_cache import TokenCache
from penstock.feed.windows import WindowPlan
from penstock.plans.orders import Order, ShardLocal

_WINDOWS_AHEAD_BYTES = 64 << 20


class PackedEpoch:
    """Batches of one epoch, as arrays of ids. Global batch k is sequences ``[kB, (k+1)B)`` of its windows in order."""

    def __init__(
        self,
        cache: TokenCache,
        order: Order,
        *,
        state: LoaderState,
        window_samples: int,
        sequence_length: int,
        pad_id: int,
        fields: tuple[FieldName, ...],
    ) -> None:
        self._cache = cache
        self._order = order
        self._window_samples = window_samples
        self._length = sequence_length
        self._pad_id = pad_id
        self._fields = fields
        self._last: dict[int, Sequences] = {}
        self._exclusions = [
            (entry.window if entry.epoch == state.epoch else 0, entry.sample_ids)
            for entry in state.exclusions
            if entry.epoch <= state.epoch
        ]

    def steps(
        self, state: LoaderState, batch_size: int, rank: int, world: int, *, drop_last: bool
    ) -> Generator[Step, None, None]:
        """The epoch's batches from where a state stands. Windows are made ahead, in a thread."""
        sequences = Prefetch(
            self._sequences(state.window), budget_bytes=_WINDOWS_AHEAD_BYTES, size_of=lambda made: made.size_bytes
        )
        steps = self._deal(iter(sequences), state, batch_size, rank, world, drop_last=drop_last)
        try:
            while True:
                began = time.perf_counter()
                step = next(steps, None)
                self._cache.timings.waited(time.perf_counter() - began)
                if step is None:
                    return
                yield step
        finally:
            sequences.close()

    def _deal(
        self,
        windows: Iterator[Sequences],
        state: LoaderState,
        batch_size: int,
        rank: int,
        world: int,
        *,
        drop_last: bool,
    ) -> Iterator[Step]:
        step, window, offset = state.step, state.window, state.offset
        pieces: list[tuple[Sequences, int, int]] = []
        wanted = batch_size
        for made in windows:
            while offset < len(made):
                stop = min(offset + wanted, len(made))
                pieces.append((made, offset, stop))
                wanted -= stop - offset
                offset = stop
                if not wanted:
                    step += 1
                    at_end = offset == len(made)
                    batch, size = self._batch(pieces, rank, world)
                    yield Step(batch, size, step, window + at_end, 0 if at_end else offset)
                    pieces, wanted = [], batch_size
            window, offset = window + 1, 0
        if pieces and not drop_last:
            batch, size = self._batch(pieces, rank, world)
            yield Step(batch, size, step + 1, window, 0)

    def _batch(self, pieces: list[tuple[Sequences, int, int]], rank: int, world: int) -> tuple[dict[str, Any], int]:
        """One rank's share of a global batch: its rows ``[rank::world]``, from one window or several."""
        shares = []
        taken = 0
        for made, start, stop in pieces:
            first = min(stop, start + (rank - taken) % world)
            shares.append(
                {**made.fields(self._fields, first, stop, world), "sample_ids": made.sample_ids(first, stop, world)}
            )
            taken += stop - start
        batch = shares[0]
        if len(shares) > 1:
            batch = {name: np.concatenate([share[name] for share in shares]) for name in batch}
        return batch, sum(array.nbytes for array in batch.values())

    # -- windows -------------------------------------------------------------------------------------------------------

    def _plan(self, window: int) -> WindowPlan:
        chosen = [ids for first, ids in self._exclusions if first <= window]
        excluded = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))
        return WindowPlan(order=self._order, window_samples=self._window_samples, excluded=excluded)

    def _sequences(self, first: int) -> Iterator[Sequences]:
        for window in range(first, self._plan(0).window_count):
            yield self._made(window)

    def _made(self, window: int) -> Sequences:
        read = self._plan(window).read(window, self._cache)
        return Sequences(read, length=self._length, pad_id=self._pad_id)

    # -- by number -----------------------------------------------------------------------------------------------------

    def batch_count(self, batch_size: int, *, drop_last: bool) -> int:
        total = int(self._sequence_starts[-1])
        return total // batch_size if drop_last else -(-total // batch_size)

    def batch(self, k: int, batch_size: int, rank: int, world: int) -> dict[str, Any]:
        """Batch k: finds its windows by the counts of the token cache, and makes them."""
        starts = self._sequence_starts
        first, last = k * batch_size, min((k + 1) * batch_size, int(starts[-1]))
        window = int(np.searchsorted(starts, first, side="right")) - 1
        pieces = []
        while first < last:
            stop = min(last, int(starts[window + 1]))
            if stop > first:
                begin = int(starts[window])
                pieces.append((self._kept(window), first - begin, stop - begin))
                first = stop
            window += 1
        return self._batch(pieces, rank, world)[0]

    def place(self, sequence: int) -> tuple[int, int]:
        """The window in which a sequence of the epoch stands, and its place there; behind the last, the next window."""
        starts = self._sequence_starts
        window = int(np.searchsorted(starts, min(sequence, int(starts[-1])), side="right")) - 1
        return window, max(0, min(sequence, int(starts[-1])) - int(starts[window]))

    def _kept(self, window: int) -> Sequences:
        """A window, made or still there: batches asked for one after the other come from the same one or two."""
        if window not in self._last:
            while len(self._last) > 1:
                del self._last[next(iter(self._last))]
            self._last[window] = self._made(window)
        return self._last[window]

    @cached_property
    def _sequence_starts(self) -> np.ndarray:
        """How many sequences come before each window, and in all; from the counts of the token cache."""
        of_chunks = self._cache.token_counts()
        missing = int((of_chunks < 0).sum())
        if missing:
            raise ConfigError(
                f"the number of sequences is known once all is tokenised, and {missing} of {len(of_chunks)} chunks are "
                "not: run `penstock tokenize`, or iterate"
            )
        tokens = [self._token_count(window, of_chunks) for window in range(self._plan(0).window_count)]
        sequences = -(-np.array(tokens, dtype=np.int64) // self._length)
        return np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])

    def _token_count(self, window: int, of_chunks: np.ndarray) -> int:
        """Tokens of a window: by its chunks' counts where it is made of whole ones, else by its samples'."""
        plan = self._plan(window)
        if isinstance(self._order, ShardLocal) and not len(plan.excluded):
            return int(of_chunks[self._order.window_chunk_ids(window)].sum())
        numbers, places = np.divmod(np.sort(plan.sample_ids(window)), self._cache.chunk_size)
        total = 0
        for number in np.unique(numbers).tolist():
            offsets = self._cache.chunks([number])[0].offsets
            mine = places[numbers == number]
            total += int((offsets[mine + 1] - offsets[mine]).sum())
        return total

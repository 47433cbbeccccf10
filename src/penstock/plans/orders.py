"""Orders: which sample stands at which position of an epoch, as a pure function of (seed, epoch, position).

    sequential    as they lie
    shuffled      any sample anywhere: the best mixing, a read a sample
    shard-local   chunks are shuffled, and samples within a window of some chunks: mixes well and reads whole chunks
    numpy         `numpy.random.default_rng(seed + epoch).permutation(size)`, for those who need that very order; an
                  array, so only for small data sets

All of them answer at any position at the same cost, in both directions.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from penstock.errors import ConfigError
from penstock.plans.permutation import Permutation, derive_key

OrderName = Literal["sequential", "shuffled", "shard-local", "numpy"]
ORDERS: tuple[OrderName, ...] = ("sequential", "shuffled", "shard-local", "numpy")
NUMPY_LIMIT = 10_000_000
_WINDOWS_TOGETHER = 16
"""The chunks of so many windows are worked out at a time: it costs little more than those of one."""


class Order(Protocol):
    """The samples ``0..size-1`` in the order of one epoch. Stateless; safe for threads; pickles."""

    @property
    def size(self) -> int: ...

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The ids of the samples at these positions."""
        ...

    def position_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Where these samples stand: the inverse of `at`."""
        ...


class Sequential:
    """Samples as they lie."""

    def __init__(self, size: int) -> None:
        self.size = size

    def at(self, positions: np.ndarray) -> np.ndarray:
        return np.asarray(positions, dtype=np.int64)

    def position_of(self, sample_ids: np.ndarray) -> np.ndarray:
        return np.asarray(sample_ids, dtype=np.int64)


class Shuffled:
    """Any sample anywhere."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._samples = Permutation(size, derive_key("samples", *key))

    def at(self, positions: np.ndarray) -> np.ndarray:
        return self._samples.at(positions)

    def position_of(self, sample_ids: np.ndarray) -> np.ndarray:
        return self._samples.position_of(sample_ids)


class ShardLocal:
    """Chunks in shuffled order; samples shuffled within windows of `window_chunks` chunks of that order.

    A chunk is `chunk_size` consecutive ids, so only the last one is short; where it stands in the order follows from
    the inverse permutation, and with it where every other chunk begins. No sum over chunks is ever taken.
    """

    def __init__(self, size: int, *key: int | str, chunk_size: int, window_chunks: int) -> None:
        if chunk_size < 1 or window_chunks < 1:
            raise ConfigError(
                f"chunk_size={chunk_size}, window_chunks={window_chunks} hold no sample: expected 1 or more"
            )
        self.size = size
        self.chunk_size = chunk_size
        self.window_chunks = window_chunks
        self._key = key
        self.chunk_count = -(-size // chunk_size)
        self._chunks = Permutation(self.chunk_count, derive_key("chunks", *key))
        self._missing = self.chunk_count * chunk_size - size
        """How many samples the last chunk lacks."""
        self._short_slot = self._chunks.position_of(self.chunk_count - 1) if self.chunk_count else 0
        self._chunk_ids: dict[int, np.ndarray] = {}
        """Of some windows, by the first of them: who asks for those of one asks again, and for its neighbours."""

    @property
    def window_count(self) -> int:
        return -(-self.chunk_count // self.window_chunks)

    def window_start(self, window: int) -> int:
        """The position at which a window begins; that of `window_count` is the end."""
        slot = min(window * self.window_chunks, self.chunk_count)
        return slot * self.chunk_size - (self._missing if slot > self._short_slot else 0)

    def window_of(self, positions: np.ndarray) -> np.ndarray:
        return self._slot_of(positions)[0] // self.window_chunks

    def window_chunk_ids(self, window: int) -> np.ndarray:
        """The chunks a window is made of, in order: what has to be read for it."""
        first = window // _WINDOWS_TOGETHER * _WINDOWS_TOGETHER
        found = self._chunk_ids.get(first)
        if found is None:
            start, stop = (number * self.window_chunks for number in (first, first + _WINDOWS_TOGETHER))
            found = self._chunks.at(np.arange(start, min(stop, self.chunk_count)))
            if len(self._chunk_ids) > 1:
                self._chunk_ids.clear()
            self._chunk_ids[first] = found
        return found[(window - first) * self.window_chunks : (window - first + 1) * self.window_chunks]

    def window_order(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """What stands at each position of a window: which of its chunks, and which sample of that."""
        start, stop = self.window_start(window), self.window_start(window + 1)
        slots, places = self._slot_of(self._inner(window).at(np.arange(stop - start)) + start)
        return slots - window * self.window_chunks, places

    def at(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        slot, inside = self._slot_of(self._shuffle(positions, forward=True))
        return self._chunks.at(slot) * self.chunk_size + inside

    def position_of(self, sample_ids: np.ndarray) -> np.ndarray:
        sample_ids = np.asarray(sample_ids, dtype=np.int64)
        slot = self._chunks.position_of(sample_ids // self.chunk_size)
        return self._shuffle(self._slot_start(slot) + sample_ids % self.chunk_size, forward=False)

    def _shuffle(self, positions: np.ndarray, *, forward: bool) -> np.ndarray:
        """Move positions about within their windows."""
        result = np.empty_like(positions)
        windows = self.window_of(positions)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            inner, start = self._inner(window), self.window_start(window)
            move = inner.at if forward else inner.position_of
            result[chosen] = start + move(positions[chosen] - start)
        return result

    def _inner(self, window: int) -> Permutation:
        size = self.window_start(window + 1) - self.window_start(window)
        return Permutation(size, derive_key("window", window, *self._key))

    def _slot_start(self, slot: np.ndarray | int) -> np.ndarray:
        slot = np.asarray(slot, dtype=np.int64)
        return slot * self.chunk_size - np.where(slot > self._short_slot, self._missing, 0)

    def _slot_of(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The place of a position's chunk in the order, and the place in the chunk."""
        if self._missing:
            after_short = positions >= (self._short_slot + 1) * self.chunk_size - self._missing
            positions = positions + after_short * self._missing
        slots = positions // self.chunk_size
        return slots, positions - slots * self.chunk_size


class NumpyOrder:
    """One array of all ids, as the usual loaders make it."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        if size > NUMPY_LIMIT:
            raise ConfigError(
                f"the numpy order of {size} samples would be an array of all of them: expected {NUMPY_LIMIT} or fewer; "
                "choose 'shuffled' or 'shard-local'"
            )
        self.size = size
        self._seed = seed + epoch

    @cached_property
    def _ids(self) -> np.ndarray:
        return np.random.default_rng(self._seed).permutation(self.size)

    @cached_property
    def _positions(self) -> np.ndarray:
        return np.argsort(self._ids)

    def at(self, positions: np.ndarray) -> np.ndarray:
        return self._ids[positions]

    def position_of(self, sample_ids: np.ndarray) -> np.ndarray:
        return self._positions[sample_ids]


def make_order(
    name: OrderName,
    size: int,
    *,
    seed: int,
    epoch: int,
    source: str = "",
    chunk_size: int = 4_000,
    window_chunks: int = 16,
) -> Order:
    """The order of one epoch.

    Args:
        name: One of `ORDERS`.
        size: How many samples there are.
        seed: The user's.
        epoch: Which pass over the data; every one has an order of its own.
        source: Which of several data sets.
        chunk_size: Samples that lie and are read together.
        window_chunks: Chunks that are mixed with each other.
    """
    if name == "sequential":
        return Sequential(size)
    if name == "shuffled":
        return Shuffled(size, seed, epoch, source)
    if name == "shard-local":
        return ShardLocal(size, seed, epoch, source, chunk_size=chunk_size, window_chunks=window_chunks)
    if name == "numpy":
        return NumpyOrder(size, seed=seed, epoch=epoch)
    raise ConfigError(f"order={name!r} is unknown: expected one of {', '.join(ORDERS)}")

"""A shuffled order without an array: any position of a permutation of 0..N-1 by arithmetic alone.

A keyed Feistel network permutes the numbers of `bits` bits, where 2**bits is the first power of two at or above N; a
number that falls outside 0..N-1 is sent round again until it falls inside (cycle walking), which takes less than two
rounds on average and keeps it a bijection. Both directions cost the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from operator import index
from typing import overload

import numpy as np

from penstock.errors import ConfigError

_ROUNDS = 8
_TILE = 1 << 14
"""Numbers at a time: three arrays of them fit the processor's cache."""
_TABLE_PAYS = 8
"""How many numbers, for each value of a half, make it worth while to work out a table of all of them."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_STIR = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
LARGEST = 2**63 - 1


def derive_key(*parts: int | str) -> bytes:
    """64 bytes that depend on every part and on where it stands: (42, 1) and (421,) have nothing in common."""
    # A number of numpy's is the number it is: named by its type, it would have an order of its own.
    plain = (part if isinstance(part, str) else int(index(part)) for part in parts)
    told = b"".join(f"{type(part).__name__}:{len(str(part))}:{part};".encode() for part in plain)
    return hashlib.blake2b(told, digest_size=64, person=b"penstock order").digest()


class Permutation:
    """A permutation of ``0..size-1`` that is a function of its key. Holds no array; safe for threads; pickles."""

    __slots__ = ("_high_bits", "_keys", "_low_bits", "size")

    def __init__(self, size: int, key: bytes) -> None:
        """Remember the key.

        Args:
            size: How many numbers are permuted; up to 2**63 - 1.
            key: From `derive_key`.
        """
        if not 0 <= size <= LARGEST:
            raise ConfigError(f"size={size} cannot be permuted: expected 0 to {LARGEST}")
        self.size = size
        bits = max(2, (size - 1).bit_length())  # of the largest number, not of their count: 2**k + 1 needs k + 1 bits
        self._low_bits = (bits + 1) // 2
        self._high_bits = bits - self._low_bits
        self._keys = tuple(np.frombuffer(key, dtype="<u8")[:_ROUNDS])

    @overload
    def at(self, positions: int) -> int: ...
    @overload
    def at(self, positions: np.ndarray) -> np.ndarray: ...
    def at(self, positions: int | np.ndarray) -> int | np.ndarray:
        """What stands at a position, or at each of several."""
        return self._walk(positions, forward=True)

    @overload
    def position_of(self, values: int) -> int: ...
    @overload
    def position_of(self, values: np.ndarray) -> np.ndarray: ...
    def position_of(self, values: int | np.ndarray) -> int | np.ndarray:
        """Where a value stands: the inverse of `at`."""
        return self._walk(values, forward=False)

    def _walk(self, numbers: int | np.ndarray, *, forward: bool) -> int | np.ndarray:
        flat = np.atleast_1d(np.asarray(numbers, dtype=np.int64))
        if flat.size and (flat.min() < 0 or flat.max() >= self.size):
            raise ConfigError(f"positions {flat.min()} to {flat.max()} are not all in 0 to {self.size - 1}")
        result = np.empty(flat.shape, dtype=np.int64)
        if self.size > 1:
            for start in range(0, len(flat), _TILE):
                result[start : start + _TILE] = self._tile(flat[start : start + _TILE], forward=forward)
        else:
            result[:] = 0
        return int(result[0]) if np.ndim(numbers) == 0 else result

    def _tile(self, numbers: np.ndarray, *, forward: bool) -> np.ndarray:
        few_halves = _TABLE_PAYS << self._low_bits <= len(numbers)
        once = self._by_table(forward) if few_halves else partial(self._round_trip, forward=forward)
        every = 1 << (self._low_bits + self._high_bits)
        if few_halves and every <= 2 * len(numbers):  # most of all there are: those outside are then looked up, too
            walked = once(np.arange(every))
            once = walked.take
            walked = walked[numbers]
        else:
            walked = once(numbers.astype(np.uint64))
        outside = np.flatnonzero(walked >= self.size)
        while len(outside):
            again = once(walked[outside])
            walked[outside] = again
            outside = outside[again >= self.size]
        return walked.astype(np.int64)

    def _round_trip(self, numbers: np.ndarray, *, forward: bool) -> np.ndarray:
        """Through the network once. Each round changes one half by a function of the other: so it can be undone."""
        low = numbers & np.uint64((1 << self._low_bits) - 1)
        high = numbers >> np.uint64(self._low_bits)
        stirred, shifted = np.empty_like(low), np.empty_like(low)
        for number in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
            changed, by = (high, low) if number % 2 else (low, high)
            np.bitwise_xor(changed, _stir(by, self._keys[number], self._mask(number), stirred, shifted), out=changed)
        np.left_shift(high, np.uint64(self._low_bits), out=high)
        return np.bitwise_or(high, low, out=high)

    def _by_table(self, forward: bool) -> Callable[[np.ndarray], np.ndarray]:
        """The same for small numbers: a half has so few values that each is stirred once, and looked up."""
        halves = np.empty((_ROUNDS, 1 << self._low_bits), dtype=np.uint64)
        halves[:] = np.arange(1 << self._low_bits, dtype=np.uint64)
        keys = np.array(self._keys, dtype=np.uint64)[:, np.newaxis]
        masks = np.array([[self._mask(number)] for number in range(_ROUNDS)])
        tables = _stir(halves, keys, masks, np.empty_like(halves), np.empty_like(halves)).astype(np.int64)

        def once(numbers: np.ndarray) -> np.ndarray:
            high = numbers.astype(np.int64)
            low = high & ((1 << self._low_bits) - 1)
            high >>= self._low_bits
            spare = np.empty_like(low)
            for number in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
                changed, by = (high, low) if number % 2 else (low, high)
                np.bitwise_xor(changed, tables[number].take(by, out=spare, mode="clip"), out=changed)
            np.left_shift(high, self._low_bits, out=high)
            return np.bitwise_or(high, low, out=high)

        return once

    def _mask(self, number: int) -> np.uint64:
        """The bits of the half that a round changes."""
        return np.uint64((1 << (self._high_bits if number % 2 else self._low_bits)) - 1)


def _stir(
    by: np.ndarray, key: np.ndarray, mask: np.ndarray | np.uint64, stirred: np.ndarray, shifted: np.ndarray
) -> np.ndarray:
    """What a round changes one half by, for each of these values of the other; in memory that is given."""
    np.add(by, key, out=stirred)
    np.multiply(stirred, _MIX, out=stirred)
    np.right_shift(stirred, _SHIFT, out=shifted)
    np.bitwise_xor(stirred, shifted, out=stirred)
    np.multiply(stirred, _STIR, out=stirred)
    np.right_shift(stirred, _SHIFT, out=stirred)  # the upper bits are the well mixed ones
    return np.bitwise_and(stirred, mask, out=stirred)

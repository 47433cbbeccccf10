"""Numbers of a few bits each, without gaps between them: in planes, so that many are packed and compared at a time.

    12 bits:  plane of the low 8 bits, a byte a number  ──  plane of the high 4 bits, two numbers a byte

A plane is 8, 4, 2 or 1 bits wide, the widest first and with the lowest bits. Of a plane of 4 bits the first half of the
numbers lies in the low halves of its bytes, the second half in the high ones; of narrower planes likewise. So each step
over them is one pass over bytes that lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WIDTHS = (8, 8, 4, 2, 1)
Planes = list[tuple[int, np.ndarray]]
"""The bits of numbers, a byte each: how far to shift a plane, and the plane; the lowest first."""


def bits_for(count: int) -> int:
    """Bits that numbers below `count` need."""
    return max(1, (count - 1).bit_length())


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` numbers."""
    return sum(_plane_bytes(count, width) for _, width in _planes(bits))


def pack_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits, at most 16, as bytes."""
    flat = numbers.reshape(-1).astype(np.uint16)
    return np.concatenate([_packed(flat >> shift, width) for shift, width in _planes(bits)])


def unpack_planes(data: np.ndarray, count: int, bits: int) -> Planes:
    """The planes of `count` numbers that were packed."""
    planes: Planes = []
    at = 0
    for shift, width in _planes(bits):
        size = _plane_bytes(count, width)
        planes.append((shift, _unpacked(data[at : at + size], count, width)))
        at += size
    return planes


def numbers_of(planes: Planes, which: slice = slice(None)) -> np.ndarray:
    """The numbers themselves, or some of them, as uint16."""
    made = planes[0][1][which].astype(np.uint16)
    for shift, plane in planes[1:]:
        made |= plane[which].astype(np.uint16) << shift
    return made


def rising(planes: Planes, row: int) -> bool:
    """Whether the numbers of every row go up, each larger than the one before it."""
    _, low = planes[0]
    up = low[1:] > low[:-1]
    for _, plane in planes[1:]:
        up &= plane[1:] == plane[:-1]
        up |= plane[1:] > plane[:-1]
    up[row - 1 :: row] = True  # from one row to the next
    return bool(up.all())


def _planes(bits: int) -> Sequence[tuple[int, int]]:
    """Where each plane's bits begin in a number, and how many they are."""
    found: list[tuple[int, int]] = []
    shift = 0
    for width in _WIDTHS:
        if bits - shift >= width:
            found.append((shift, width))
            shift += width
    return found


def _plane_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def _packed(numbers: np.ndarray, width: int) -> np.ndarray:
    """The low bits of numbers as one plane."""
    low = (numbers & ((1 << width) - 1)).astype(np.uint8)
    size = _plane_bytes(len(low), width)
    made = np.zeros(size, np.uint8)
    for part in range(8 // width):
        some = low[part * size : (part + 1) * size]
        made[: len(some)] |= some << (part * width)
    return made


def _unpacked(plane: np.ndarray, count: int, width: int) -> np.ndarray:
    """A byte for each number of a plane."""
    if width == 8:
        return plane
    made = np.empty(count, np.uint8)
    last = 8 // width - 1
    for part in range(last + 1):
        some = made[part * len(plane) : (part + 1) * len(plane)]
        if part:
            np.right_shift(plane[: len(some)], part * width, out=some)
        if part < last:
            np.bitwise_and(some if part else plane[: len(some)], (1 << width) - 1, out=some)
    return made

"""Numbers of a few bits each, without gaps between them."""

from __future__ import annotations

import numpy as np


def bits_for(count: int) -> int:
    """Bits that numbers below `count` need."""
    return max(1, (count - 1).bit_length())


def packed_bytes(numbers: int, bits: int) -> int:
    return -(-numbers * bits // 8)


def pack_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers below ``2**bits`` as rows of bytes, the lowest bit first."""
    rows = numbers.shape[0]
    if bits == 12 and numbers.shape[1] % 2 == 0:  # chunks of 4,096: two numbers are three bytes
        low, high = numbers[:, 0::2].astype(np.uint16), numbers[:, 1::2].astype(np.uint16)
        made = np.empty((rows, numbers.shape[1] // 2, 3), np.uint8)
        made[..., 0], made[..., 1], made[..., 2] = low & 255, low >> 8 | (high & 15) << 4, high >> 4
        return made.reshape(rows, -1)
    spread = (numbers.astype(np.uint32)[:, :, None] >> np.arange(bits, dtype=np.uint32)) & 1
    return np.packbits(spread.astype(np.uint8).reshape(rows, -1), axis=1, bitorder="little")


def unpack_bits(data: np.ndarray, count: int, bits: int) -> np.ndarray:
    """What `pack_bits` made rows of `count` numbers into; uint16 up to 16 bits."""
    rows = data.shape[0]
    if bits == 12 and count % 2 == 0:
        made = np.empty((rows * count // 2, 2), np.uint16)
        made[:, 0], made[:, 1] = _pairs(data)
        return made.reshape(rows, count)
    spread = np.unpackbits(data, axis=1, count=count * bits, bitorder="little").reshape(rows, count, bits)
    return (spread.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(axis=2).astype(np.uint16)


def last_of_rising(data: np.ndarray, count: int, bits: int) -> np.ndarray | None:
    """The last number of each row, where those of every row go up; None where they do not."""
    if bits != 12 or count % 2:
        numbers = unpack_bits(data, count, bits)
        return None if (numbers[:, 1:] <= numbers[:, :-1]).any() else numbers[:, -1]
    first, second = _pairs(data)
    if (first >= second).any():
        return None
    falls = second[:-1] >= first[1:]
    row = count // 2
    falls[row - 1 :: row] = False  # from one row to the next
    return None if falls.any() else second[row - 1 :: row]


def _pairs(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each two numbers of 12 bits the first, and the second: in the first and the last two of three bytes."""
    whole = np.ascontiguousarray(data)
    pairs = whole.size // 3
    first, second = (np.ndarray((pairs,), "<u2", whole, offset, (3,)) for offset in (0, 1))
    return first & 4095, second >> 4

"""Thrift's compact protocol, as much of it as Parquet's page headers and a small footer take.

A struct read is a dict by field number, a list a list; what is written is a list of (field number, value) with values
of the classes below. What is read comes from a stranger: whatever does not add up is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_DEEPEST = 16
_DOUBLE_BYTES = 8


class NotWhole(ValueError):
    """The bytes end before the struct does."""


def read_struct(data: memoryview, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The struct that begins at a place, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("structs are nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    try:
        while True:
            head = data[at]
            at += 1
            kind = head & 0x0F
            if kind == _STOP:
                return fields, at
            if head >> 4:
                number += head >> 4
            else:
                number, at = _zigzag(data, at)
            fields[number], at = _value(data, at, kind, depth)
    except IndexError:
        raise NotWhole("a struct breaks off") from None


def _value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        return _zigzag(data, at)
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _STRUCT:
        return read_struct(data, at, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, at, depth)
    if kind not in (_BYTE, _DOUBLE, _BINARY):
        raise ValueError(f"a field of kind {kind}")
    size, at = (1, at) if kind == _BYTE else (_DOUBLE_BYTES, at) if kind == _DOUBLE else _varint(data, at)
    if at + size > len(data):
        raise IndexError
    return data[at : at + size], at + size


def _list(data: memoryview, at: int, depth: int) -> tuple[list[Any], int]:
    head = data[at]
    at += 1
    size, kind = head >> 4, head & 0x0F
    if size == 0x0F:
        size, at = _varint(data, at)
    if size > len(data) - at:  # an element takes a byte or more
        raise IndexError
    values = []
    for _ in range(size):
        if kind in (_TRUE, _FALSE):
            value, at = data[at] == _TRUE, at + 1
        else:
            value, at = _value(data, at, kind, depth + 1)
        values.append(value)
    return values, at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _zigzag(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


class I64(int):
    """A number to be written as one of 64 bits; a plain int is one of 32."""


Fields = Sequence[tuple[int, Any]]


def write_struct(fields: Fields) -> bytes:
    """A struct: each field an int, an `I64`, bytes, a struct's fields as a tuple, or a list of any one of these."""
    out = bytearray()
    last = 0
    for number, value in fields:
        kind = _kind(value)
        step = number - last
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _written_zigzag(number)
        out += _written(value)
        last = number
    return bytes(out) + b"\0"


def _kind(value: Any) -> int:
    if isinstance(value, I64):
        return _I64
    if isinstance(value, int):
        return _I32
    if isinstance(value, bytes):
        return _BINARY
    return _LIST if isinstance(value, list) else _STRUCT


def _written(value: Any) -> bytes:
    if isinstance(value, int):
        return _written_zigzag(value)
    if isinstance(value, bytes):
        return _written_varint(len(value)) + value
    if isinstance(value, list):
        kind = _kind(value[0])
        head = (
            bytes([len(value) << 4 | kind]) if len(value) < 15 else bytes([0xF0 | kind]) + _written_varint(len(value))
        )
        return head + b"".join(map(_written, value))
    return write_struct(value)


def _written_zigzag(value: int) -> bytes:
    return _written_varint((value << 1) ^ (value >> 63))


def _written_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

"""Data that comes tokenised: columns of token ids, and files of nothing else.

    a column of ids      "input_ids", or the one the user names; a row is a sample
    .npy, two axes       a row is a sample
    .npy, one axis       a flat stream of tokens, cut into samples of `tokens_per_sample`
    .bin                 the same without NumPy's header: uint16, or `token_dtype`; llm.c's header is understood
    .bin beside .idx     Megatron's pair: the index says where each sequence ends; a sequence is a sample

Tokens are taken as they are: nothing is put between samples that came tokenised. A sample is stored as
``{"input_ids": [...]}``.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import orjson

from penstock.errors import ConfigError, SourceError
from penstock.sources.base import Cursor, RowBatch
from penstock.sources.streams import go_to, read_whole, unseekable

TOKEN_COLUMN = "input_ids"
TOKENS_PER_SAMPLE = 2048
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
HIGHEST_ID = 2**31 - 1

_BATCH_TOKENS = 1 << 18
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
_LLM_C_HEADER_BYTES = 256 * 4
_NUMPY = b"\x93NUMPY"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """What the user says about files of tokens."""

    tokens_per_sample: int | None = None
    """How many tokens of a flat file make a sample; 2048 where not given."""
    token_dtype: str | None = None
    """What numbers a .bin file holds; uint16 where neither this nor the file says."""

    def __post_init__(self) -> None:
        if self.tokens_per_sample is not None and self.tokens_per_sample < 1:
            raise ConfigError(f"tokens_per_sample={self.tokens_per_sample} holds no token: expected 1 or more")
        if self.token_dtype is not None and self.token_dtype not in TOKEN_DTYPES:
            raise ConfigError(f"token_dtype={self.token_dtype!r} is unknown: expected {', '.join(TOKEN_DTYPES)}")

    @property
    def width(self) -> int:
        return self.tokens_per_sample or TOKENS_PER_SAMPLE


def tokens_of(row: dict[str, Any], column: str) -> np.ndarray:
    """The token ids of a row, or a SourceError that says why it has none."""
    value = row.get(column)
    if not isinstance(value, list | np.ndarray):
        got = "no such column" if column not in row else type(value).__name__
        raise SourceError(f"column {column!r} holds no list of token ids: got {got}")
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.empty((0, 0))
    if not len(ids) and ids.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SourceError(f"column {column!r} holds a list that is not of whole numbers: {value!r:.60}")
    if ids.min() < 0 or ids.max() > HIGHEST_ID:
        raise SourceError(f"column {column!r} holds ids from {ids.min()} to {ids.max()}: expected 0 to {HIGHEST_ID}")
    return ids


def read_npy(file: BinaryIO, name: str, start: Cursor, options: TokenOptions) -> Iterator[RowBatch]:
    """Samples of a NumPy file of whole numbers; nothing in it is executed. A file without NumPy's header is one of raw
    tokens, where the user says of which kind."""
    begin = file.read(len(_NUMPY))
    if begin != _NUMPY:
        if options.token_dtype is None:
            raise SourceError(f"{name}: not a NumPy file: where it holds raw tokens, say which with --token-dtype")
        yield from _raw(file, name, start, begin, options)
        return
    header, shape, in_columns, dtype = _npy_header(file, name)
    if dtype.kind not in "iu":
        raise SourceError(f"{name}: holds {dtype}, expected whole numbers: token ids")
    if len(shape) not in (1, 2) or (len(shape) == 2 and in_columns):
        raise SourceError(
            f"{name}: holds an array of shape {shape}{' in column order' if in_columns else ''}: "
            "expected (tokens,) or (samples, tokens)"
        )
    width = shape[1] if len(shape) == 2 else options.width
    end = len(header) + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not width:
        raise SourceError(f"{name}: holds an array of shape {shape}: its samples have no tokens")
    yield from _samples(file, name, start, at=len(header), dtype=dtype, width=width, end=end)


def read_bin(file: BinaryIO, name: str, start: Cursor, options: TokenOptions) -> Iterator[RowBatch]:
    """Samples of a file of raw tokens, end to end."""
    yield from _raw(file, name, start, b"", options)


def _raw(file: BinaryIO, name: str, start: Cursor, begin: bytes, options: TokenOptions) -> Iterator[RowBatch]:
    begin += file.read(8 - len(begin))
    dtype = np.dtype(options.token_dtype or "uint16").newbyteorder("<")
    header_bytes = 0
    if options.token_dtype is None and len(begin) == 8 and (magic := struct.unpack("<i", begin[:4])[0]) in _LLM_C:
        header_bytes, dtype = _LLM_C_HEADER_BYTES, np.dtype(_LLM_C[magic])
        begin += file.read(header_bytes - len(begin))
    file = file if header_bytes else _behind(begin, file)
    yield from _samples(file, name, start, at=header_bytes, dtype=dtype, width=options.width)


def _samples(
    file: BinaryIO, name: str, start: Cursor, *, at: int, dtype: np.dtype, width: int, end: int | None = None
) -> Iterator[RowBatch]:
    """Samples of `width` tokens from a stream that stands at byte `at`, up to byte `end` or its own end; the last of a
    stream without a known end may be short."""
    size = width * dtype.itemsize
    place, row = max(at, start.offset), start.row
    go_to(file, place, given=at)
    per_batch = max(1, _BATCH_TOKENS // width) * size
    while True:
        data = read_whole(file, per_batch if end is None else min(per_batch, end - place))
        if len(data) % dtype.itemsize or (end is not None and len(data) < min(per_batch, end - place)):
            raise EOFError(f"it ends in the middle of a sample, at byte {place + len(data)}")
        if not data:
            return
        ids = np.frombuffer(data, dtype=dtype)
        rows = [ids[first : first + width] for first in range(0, len(ids), width)]
        yield token_rows(rows, name, replace(start, offset=place, row=row, skip=0))
        place += len(data)
        row += len(rows)


def token_rows(rows: list[np.ndarray], name: str, at: Cursor) -> RowBatch:
    """Samples of tokens as rows of one column."""
    values: list[dict[str, Any]] = [{TOKEN_COLUMN: np.ascontiguousarray(ids, dtype=_native(ids.dtype))} for ids in rows]
    first = at.row + 1
    return RowBatch(
        file_name=name,
        start=at,
        values=values,
        lines=[orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE) for value in values],
        numbers=list(range(first, first + len(values))),
    )


def _behind(begin: bytes, file: BinaryIO) -> BinaryIO:
    """A stream again with the bytes that were read of it already."""
    if file.seekable():
        file.seek(-len(begin), io.SEEK_CUR)
        return file
    return unseekable(_Joined(begin, file))


class _Joined:
    def __init__(self, begin: bytes, rest: BinaryIO) -> None:
        self._begin = begin
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        if not self._begin:
            return self._rest.read(size)
        data, self._begin = self._begin[:size], self._begin[size:]
        return data


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def _npy_header(file: BinaryIO, name: str) -> tuple[bytes, tuple[int, ...], bool, np.dtype]:
    """A NumPy file's header, with what it says: shape, order and type. The stream stands behind the magic word."""
    version = file.read(2)
    length = file.read(2 if version[:1] == b"\x01" else 4)
    try:
        text = file.read(int.from_bytes(length, "little"))
        header = _NUMPY + version + length + text
        read = np.lib.format.read_array_header_1_0 if version[:1] == b"\x01" else np.lib.format.read_array_header_2_0
        shape, in_columns, dtype = read(io.BytesIO(length + text))
    except (ValueError, EOFError) as error:
        raise SourceError(f"{name}: its NumPy header is damaged: {error}") from error
    return header, shape, in_columns, dtype

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
import math
import struct
import tokenize
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
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
_LLM_C_HEADER = struct.Struct("<iii1012s")
_NUMPY = b"\x93NUMPY"
_NUMPY_HEADER_BYTES = 1 << 16


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
    if isinstance(value, list) and set(map(type, value)) <= {int}:  # a bool is none, though NumPy takes it for one
        ids = np.asarray(value) if value else np.empty(0, dtype=np.int64)
    elif isinstance(value, list):
        ids = np.empty((0, 0))
    elif isinstance(value, np.ndarray):
        ids = value
    else:
        got = "no such column" if column not in row else type(value).__name__
        raise SourceError(f"column {column!r} holds no list of token ids: got {got}")
    if ids.ndim == 1 and not len(ids):
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
    end = len(header) + math.prod(shape) * dtype.itemsize
    if not width:
        raise SourceError(f"{name}: holds an array of shape {shape}: its samples have no tokens")
    yield from _samples(file, name, start, at=len(header), dtype=dtype, width=width, end=end)


def read_bin(file: BinaryIO, name: str, start: Cursor, options: TokenOptions) -> Iterator[RowBatch]:
    """Samples of a file of raw tokens, end to end."""
    yield from _raw(file, name, start, b"", options)


def _raw(file: BinaryIO, name: str, start: Cursor, begin: bytes, options: TokenOptions) -> Iterator[RowBatch]:
    begin += file.read(_LLM_C_HEADER.size - len(begin))
    told = _llm_c_header(begin, name, options)
    if told is not None:
        kind, tokens = told
        dtype, at = np.dtype(kind).newbyteorder("<"), _LLM_C_HEADER.size
        end = at + tokens * dtype.itemsize
        yield from _samples(file, name, start, at=at, dtype=dtype, width=options.width, end=end)
        return
    dtype = np.dtype(options.token_dtype or "uint16").newbyteorder("<")
    yield from _samples(_behind(begin, file), name, start, at=0, dtype=dtype, width=options.width)


def _llm_c_header(begin: bytes, name: str, options: TokenOptions) -> tuple[str, int] | None:
    """What llm.c's header says: the kind of tokens and how many; None where a file does not begin with one."""
    if len(begin) < _LLM_C_HEADER.size:
        if options.token_dtype is None and len(begin) >= 8 and int.from_bytes(begin[:4], "little") in _LLM_C:
            raise SourceError(
                f"{name}: ends inside its header, that of llm.c: it is truncated; where it holds raw tokens, say "
                "which with --token-dtype"
            )
        return None
    magic, _, tokens, rest = _LLM_C_HEADER.unpack(begin)
    if magic not in _LLM_C or any(rest):
        return None
    kind = _LLM_C[magic]
    if options.token_dtype not in (None, kind):
        raise SourceError(f"{name}: token_dtype={options.token_dtype!r}, but its header, that of llm.c, says {kind}")
    if tokens < 0:
        raise SourceError(f"{name}: its header, that of llm.c, tells of {tokens} tokens: it is damaged")
    return kind, tokens


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
            break
        ids = np.frombuffer(data, dtype=dtype)
        rows = [ids[first : first + width] for first in range(0, len(ids), width)]
        yield token_rows(rows, name, replace(start, offset=place, row=row, skip=0))
        place += len(data)
        row += len(rows)
    if end is not None and file.read(1):
        raise SourceError(f"{name}: goes on behind byte {end}, where its header says it ends: it is damaged")


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
    """A stream again with the bytes that were read of it already; one that can seek goes to its place anyway."""
    return file if file.seekable() else unseekable(_Joined(begin, file))


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
    size = int.from_bytes(length, "little")
    if version not in (b"\x01\x00", b"\x02\x00", b"\x03\x00") or size > _NUMPY_HEADER_BYTES:
        raise SourceError(f"{name}: its NumPy header is damaged: version {version.hex('.')} of {size} bytes")
    text = file.read(size)
    read = np.lib.format.read_array_header_1_0 if version[:1] == b"\x01" else np.lib.format.read_array_header_2_0
    try:
        shape, in_columns, dtype = read(io.BytesIO(length + text))
    except (ValueError, EOFError, SyntaxError, TypeError, tokenize.TokenError) as error:
        raise SourceError(f"{name}: its NumPy header is damaged: {error}") from error
    if any(type(side) is not int or side < 0 for side in shape):
        raise SourceError(f"{name}: its NumPy header is damaged: an array of shape {shape}")
    return _NUMPY + version + length + text, shape, in_columns, dtype

"""Parquet and Arrow: row groups and record batches, a few rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import orjson

from penstock.errors import SourceError
from penstock.sources.arrow_values import column_values
from penstock.sources.base import BadRow, Cursor, RowBatch, where
from penstock.sources.values import json_line

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1024
BATCH_BYTES = 4 << 20
"""Larger rows come fewer at a time."""

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_UNCONVERTIBLE = (KeyError, OverflowError, TypeError, ValueError)


def read_parquet(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one Parquet file, row group by row group; a cursor's offset is a row group's number."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(file, page_checksum_verification=True)
        _refuse_columns_named_twice(source.schema_arrow, name)
        row = start.row
        for group in range(start.offset, source.num_row_groups):
            facts = source.metadata.row_group(group)
            at = replace(start, offset=group, row=row, skip=0)
            rows = _batch_rows(facts.num_rows, facts.total_byte_size)
            for batch in source.iter_batches(batch_size=rows, row_groups=[group]):
                yield rows_of(batch, name, at)
                at = at.plus(batch.num_rows)
            row += facts.num_rows
            if at.skip != facts.num_rows:
                raise SourceError(
                    f"{name}: row group {group} has {at.skip} of its {facts.num_rows} rows: it is damaged"
                )
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{name}: not a sound Parquet file: {error}") from error


def read_arrow(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one Arrow file or stream; a cursor's offset is a record batch's number."""
    import pyarrow as pa

    try:
        row = start.row
        for number, batch in _record_batches(file, start.offset):
            _refuse_columns_named_twice(batch.schema, name)
            at = replace(start, offset=number, row=row, skip=0)
            rows = _batch_rows(batch.num_rows, batch.nbytes)
            for first in range(0, batch.num_rows, rows):
                yield rows_of(batch.slice(first, rows), name, at.plus(first))
            row += batch.num_rows
    except (pa.ArrowException, OSError, EOFError) as error:
        raise SourceError(f"{name}: not a sound Arrow file: {error}") from error


def _record_batches(file: BinaryIO, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        reader = pa.ipc.open_file(file)
        for number in range(first, reader.num_record_batches):
            yield number, reader.get_batch(number)
        return
    for number, batch in enumerate(pa.ipc.open_stream(file)):
        if number >= first:
            yield number, batch
    file.seek(-len(_STREAM_END), 2)
    if file.read() != _STREAM_END:  # Arrow itself would take any place between two batches for the end
        raise EOFError("the mark at the end of the stream is missing: it is truncated")


def _refuse_columns_named_twice(schema: pa.Schema, name: str) -> None:
    twice = sorted({column for column in schema.names if schema.names.count(column) > 1})
    if twice:
        raise SourceError(f"{name}: two columns have one name: {', '.join(map(repr, twice))}: rename one of them")


def _batch_rows(rows: int, size_bytes: int) -> int:
    """How many rows to hold at a time."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, size_bytes)))


def rows_of(batch: pa.RecordBatch, name: str, at: Cursor) -> RowBatch:
    """A record batch's rows; what cannot be one is a bad row."""
    result = RowBatch(file_name=name, start=at)
    first = at.row + at.skip + 1
    try:
        result.values, result.lines = _converted(batch)
        result.numbers = list(range(first, first + batch.num_rows))
    except _UNCONVERTIBLE:  # some row of them: a date beyond the calendar, a string that is not UTF-8
        for index in range(batch.num_rows):
            try:
                values, lines = _converted(batch.slice(index, 1))
            except _UNCONVERTIBLE as error:
                position = where(name, first + index)
                result.bad.append(BadRow(before=len(result.lines), position=position, reason=f"no row: {error}"))
            else:
                result.values += values
                result.lines += lines
                result.numbers.append(first + index)
    return result


def _converted(batch: pa.RecordBatch) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Rows as values and as lines; the values are what the lines say."""
    batch.validate(full=True)  # nobody else looks whether offsets lie inside their buffers and strings are UTF-8
    names = batch.schema.names
    columns = [column_values(column) for column in batch.columns]
    values = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if not columns:
        values = [{} for _ in range(batch.num_rows)]
    finite = not any(_may_hold_nonfinite(column) for column in batch.columns)
    lines = [json_line(value, finite=finite) for value in values]
    if not finite or not all(_is_plain(field.type) for field in batch.schema):
        values = [orjson.loads(line) for line in lines]
    return values, lines


def _is_plain(kind: pa.DataType) -> bool:
    """Whether finite values of a type stand in JSON as they are in Python."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    text = types.is_string(kind) or types.is_large_string(kind)
    return text or types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind)


def _may_hold_nonfinite(column: Any) -> bool:
    """Whether a column holds a NaN or an infinity; for one of other values made of floats, whether it could."""
    from pyarrow import types

    if types.is_floating(column.type):
        floats = column.drop_null().to_numpy(zero_copy_only=False)
        return not np.isfinite(floats).all()
    kind = str(column.type)
    return "float" in kind or "double" in kind

"""Parquet and Arrow: row groups and record batches, a few rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import orjson

from penstock.errors import SourceError
from penstock.sources.base import Cursor, RowBatch
from penstock.sources.values import json_line

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 1024


def read_parquet(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one Parquet file, row group by row group; a cursor's offset is a row group's number."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(file)
        row = start.row
        for group in range(start.offset, source.num_row_groups):
            at = replace(start, offset=group, row=row, skip=0)
            for batch in source.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                yield _rows(batch, name, at)
                at = at.plus(batch.num_rows)
            row += source.metadata.row_group(group).num_rows
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{name}: not a sound Parquet file: {error}") from error


def read_arrow(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one Arrow file or stream; a cursor's offset is a record batch's number."""
    import pyarrow as pa

    try:
        row = 0
        for number, batch in enumerate(_record_batches(file)):
            if number >= start.offset:
                at = replace(start, offset=number, row=row, skip=0)
                for first in range(0, batch.num_rows, _BATCH_ROWS):
                    yield _rows(batch.slice(first, _BATCH_ROWS), name, at.plus(first))
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{name}: not a sound Arrow file: {error}") from error


def _record_batches(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)


def _rows(batch: pa.RecordBatch, name: str, at: Cursor) -> RowBatch:
    values = batch.to_pylist()
    finite = not any(_may_hold_nonfinite(column) for column in batch.columns)
    lines = [json_line(value, finite=finite) for value in values]
    if not finite or not all(_is_plain(field.type) for field in batch.schema):
        values = [orjson.loads(line) for line in lines]  # as they are stored
    first = at.row + at.skip + 1
    numbers = list(range(first, first + len(lines)))
    return RowBatch(file_name=name, start=at, values=values, lines=lines, numbers=numbers)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether values of a type stand in JSON as they are in Python."""
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind) or types.is_boolean(kind)


def _may_hold_nonfinite(column: Any) -> bool:
    """Whether a column, or anything nested in it, holds a NaN or an infinity; for nested ones, whether it could."""
    from pyarrow import types

    kind = column.type
    if types.is_floating(kind):
        floats = column.drop_null().to_numpy(zero_copy_only=False)
        return not np.isfinite(floats).all()
    if types.is_nested(kind):
        return "float" in str(kind) or "double" in str(kind)
    return False

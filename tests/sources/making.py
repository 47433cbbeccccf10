"""Files of every kind, made in memory: the same rows give the same bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.errors import SourceError
from penstock.sources import BadRow, Cursor, ReadOptions, open_source
from sources.suite import Event, read

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": lambda data: bz2.compress(data, 1),  # blocks of 100 kB: no less can be unpacked
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def zip_of(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def tar_of(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def jsonl_of(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def parquet_of(table: pa.Table, group_rows: int = 2, **options: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file, row_group_size=group_rows, **options)
    return file.getvalue()


def arrow_file_of(table: pa.Table, batch_rows: int = 2) -> bytes:
    return _arrow(pa.ipc.new_file, table, batch_rows)


def arrow_stream_of(table: pa.Table, batch_rows: int = 2) -> bytes:
    return _arrow(pa.ipc.new_stream, table, batch_rows)


def _arrow(begin: Callable[..., Any], table: pa.Table, batch_rows: int) -> bytes:
    file = io.BytesIO()
    with begin(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return file.getvalue()


class Reading:
    """One file in a folder of its own, read to the end or to its failure."""

    def __init__(self, folder: Path, name: str, data: bytes, options: ReadOptions | None = None) -> None:
        (folder / name).write_bytes(data)
        source = open_source(folder / name, options=options)
        self.events: list[Event] = []
        self.cursors: list[Cursor | None] = []
        self.error: str | None = None
        try:
            for event, cursor in read(source):
                self.events.append(event)
                self.cursors.append(cursor)
        except SourceError as error:
            self.error = str(error)

    @property
    def values(self) -> list[dict[str, Any] | None]:
        """What was read; None for a bad row."""
        return [event.value for event in self.events]


def bad_rows(folder: Path, name: str, data: bytes) -> list[BadRow]:
    (folder / name).write_bytes(data)
    return [row for batch in open_source(folder / name).batches(Cursor()) for row in batch.bad]


def error_of(folder: Path, name: str, data: bytes, options: ReadOptions | None = None) -> str:
    """The error that reading a file ends with; it names the file."""
    error = Reading(folder, name, data, options).error
    if error is None:
        pytest.fail(f"{name} was read to its end")
    assert name in error
    return error

"""A source made of files: one, a folder of them, or a glob."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from penstock.errors import SourceError, StorageError
from penstock.sources.base import Cursor, RowBatch
from penstock.sources.jsonl import read_jsonl
from penstock.sources.text import read_text_file, read_text_lines
from penstock.storage import ObjectInfo, Storage

Reader = Callable[[BinaryIO, str, Cursor], Iterator[RowBatch]]

READERS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".txt": read_text_lines,
    ".md": read_text_file,
    ".py": read_text_file,
    ".rst": read_text_file,
}

_PROBE_BYTES = 64 << 10


class FileSource:
    """Files of one storage, read one after the other in the order given."""

    def __init__(self, *, spec: str, name: str, storage: Storage, keys: Sequence[str]) -> None:
        if not keys:
            raise SourceError(f"{spec}: no files to read: expected one of {', '.join(sorted(READERS))}")
        for text in (spec, name, *keys):
            _refuse_unless_utf8(text)
        self._spec = spec
        self._name = name
        self._storage = storage
        self._keys = list(keys)
        self._readers = [reader_for(key) for key in keys]
        self._sizes: list[int] | None = None

    @property
    def spec(self) -> str:
        return self._spec

    @property
    def name(self) -> str:
        return self._name

    def revision(self) -> dict[str, Any]:
        """Names, sizes and a digest of each file's first and last bytes: a changed file is a changed source."""
        return {"kind": "files", "files": [self._probe(key) for key in self._keys]}

    def batches(self, cursor: Cursor) -> Iterator[RowBatch]:
        for index in range(cursor.file, len(self._keys)):
            start = cursor if index == cursor.file else Cursor(file=index)
            yield from self._read_file(index, start)

    def size_bytes(self) -> int:
        if self._sizes is None:
            self._sizes = [self._head(key).size_bytes for key in self._keys]
        return sum(self._sizes)

    def position_bytes(self, cursor: Cursor) -> int:
        total = self.size_bytes()
        assert self._sizes is not None
        return min(total, sum(self._sizes[: cursor.file]) + cursor.offset)

    def _read_file(self, index: int, start: Cursor) -> Iterator[RowBatch]:
        key = self._keys[index]
        to_skip = start.skip
        try:
            with self._storage.reader(key, start.offset) as file:
                for batch in self._readers[index](file, key, replace(start, skip=0)):
                    to_skip = _drop_taken(batch, to_skip)
                    if batch.lines or batch.bad:
                        yield batch
        except StorageError as error:
            raise SourceError(f"{key}: cannot be read: {error}") from error
        if to_skip:
            raise SourceError(f"{key} ended {to_skip} rows before the place to continue from: the file has changed")

    def _head(self, key: str) -> ObjectInfo:
        try:
            return self._storage.head(key)
        except StorageError as error:
            raise SourceError(f"{self._spec}: {error}") from error

    def _probe(self, key: str) -> dict[str, Any]:
        size = self._head(key).size_bytes
        try:
            head = self._storage.get_range(key, 0, min(size, _PROBE_BYTES))
            tail = self._storage.get_range(key, max(0, size - _PROBE_BYTES), size)
        except StorageError as error:
            raise SourceError(f"{self._spec}: {error}") from error
        return {"name": key, "size_bytes": size, "probe": hashlib.sha256(head + tail).hexdigest()}


def reader_for(key: str) -> Reader:
    """The reader for a file by its suffix, or an error that lists what can be read."""
    suffix = PurePosixPath(key).suffix.lower()
    if suffix in READERS:
        return READERS[suffix]
    raise SourceError(
        f"{key}: no reader for {suffix or 'a file without suffix'!r}: expected one of {', '.join(sorted(READERS))}"
    )


def _refuse_unless_utf8(name: str) -> None:
    """Names end up in the manifest, which is JSON: a name that is not UTF-8 cannot be told there."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"{name!r}: the name is not UTF-8: rename it") from None


def _drop_taken(batch: RowBatch, taken: int) -> int:
    """Drop the first `taken` rows, good or bad, from a batch; return how many are still to drop."""
    if not taken:
        return 0
    here = min(taken, len(batch.lines) + len(batch.bad))
    good = bad = 0
    while good + bad < here:
        if bad < len(batch.bad) and batch.bad[bad].before == good:
            bad += 1
        else:
            good += 1
    del batch.lines[:good], batch.values[:good], batch.numbers[:good], batch.bad[:bad]
    batch.bad = [replace(row, before=row.before - good) for row in batch.bad]
    batch.start = batch.start.plus(here)
    return taken - here

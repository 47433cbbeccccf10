"""A source made of files: one, a folder of them, or a glob."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, BinaryIO, cast

from penstock.errors import PreconditionFailed, SourceError, StorageError
from penstock.sources.base import Cursor, RowBatch, refuse_unless_utf8
from penstock.sources.formats import FORMATS, ReadOptions, read_file, reads_about, refuse_unknown, suffixes_of
from penstock.sources.megatron import is_megatron_index, read_sequences
from penstock.storage import HubStorage, ObjectInfo, ReadableStorage

_PROBE_BYTES = 64 << 10


class FileSource:
    """Files of one storage, read one after the other in the order given."""

    def __init__(
        self, *, spec: str, name: str, storage: ReadableStorage, keys: Sequence[str], options: ReadOptions | None = None
    ) -> None:
        if not keys:
            raise SourceError(f"{spec}: no files to read: expected one of {', '.join(sorted(FORMATS))}")
        for text in (spec, name, *keys):
            refuse_unless_utf8(text)
        self._spec = spec
        self._name = name
        self._storage = storage
        self._keys = list(keys)
        self._options = options or ReadOptions()
        self._sizes: list[int] | None = None
        self._open: tuple[int, BinaryIO] | None = None
        self._opened_as: dict[str, ObjectInfo] = {}
        self._identified: dict[str, int] = {}
        """Sizes that went into the revision."""
        for key in keys:
            refuse_unknown(key)

    @property
    def spec(self) -> str:
        return self._spec

    @property
    def name(self) -> str:
        return self._name

    @property
    def pinned(self) -> str | None:
        return self._storage.commit if isinstance(self._storage, HubStorage) else None

    def revision(self) -> dict[str, Any]:
        """Names, sizes, and the store's word for the content or a digest of its first and last bytes: a changed file is
        a changed source."""
        companions = [self._index_of(key) for key in self._keys]
        files = [probe(self._storage, key, self._spec) for key in [*self._keys, *filter(None, companions)]]
        self._identified = {file["name"]: file["size_bytes"] for file in files}
        # Only what differs from the usual is told, so that an option added later changes no identity.
        chosen = {name: value for name, value in asdict(self._options).items() if value}
        return {"kind": "files", "files": files, **({"options": chosen} if chosen else {})}

    def stamp(self, first: int, last: int) -> str | None:
        """Of the files as they were when they were opened."""
        keys = self._keys[first : last + 1]
        return stamp_of(self._opened_as.get(key) or self._head(key) for key in keys)

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
        inside = 0
        if self._open is not None and self._open[0] == cursor.file and not self._open[1].closed:
            # Of the file itself, whatever is unpacked from it.
            file = self._open[1]
            inside = min(file.count, self._sizes[cursor.file]) if isinstance(file, _Counted) else file.tell()
        return min(total, sum(self._sizes[: cursor.file]) + inside)

    def _read_file(self, index: int, start: Cursor) -> Iterator[RowBatch]:
        key = self._keys[index]
        to_skip = start.skip
        before = self._opened_as[key] = self._head(key)
        if before.size_bytes != self._identified.get(key, before.size_bytes):
            raise _changed(key)
        try:
            with self._storage.reader(key) as raw:
                file = cast(BinaryIO, _Counted(raw)) if reads_about(key) else raw
                self._open = (index, file)
                for batch in self._rows(file, key, replace(start, skip=0)):
                    to_skip = _drop_taken(batch, to_skip)
                    if batch.lines or batch.bad:
                        yield batch
        except PreconditionFailed as error:  # another version than the one that was pinned
            raise _changed(key) from error
        except StorageError as error:
            raise SourceError(f"{key}: cannot be read: {error}") from error
        after = self._head(key)
        if (after.size_bytes, after.modified) != (before.size_bytes, before.modified):
            raise _changed(key)
        if to_skip:
            raise SourceError(f"{key} ended {to_skip} rows before the place to continue from: the file has changed")

    def _rows(self, file: BinaryIO, key: str, start: Cursor) -> Iterator[RowBatch]:
        index_key = self._index_of(key)
        if index_key is None:
            return read_file(file, key, start, self._options)
        return read_sequences(file, key, start, self._storage, index_key)

    def _index_of(self, key: str) -> str | None:
        """The index that says where the sequences of a file of tokens end, where it has one."""
        suffix, codec = suffixes_of(key)
        if suffix != ".bin":
            return None
        index_key = key[: len(key) - len(suffix + codec)] + ".idx"
        with _told(self._spec):
            found = self._storage.exists(index_key) and is_megatron_index(self._storage, index_key)
        if found and codec:
            raise SourceError(f"{key} has an index beside it, {index_key}, which knows it unpacked: unpack it")
        return index_key if found else None

    def _head(self, key: str) -> ObjectInfo:
        with _told(self._spec):
            return self._storage.head(key)


def probe(storage: ReadableStorage, key: str, spec: str) -> dict[str, Any]:
    """What tells a file from another one of its name without reading all of it."""
    with _told(spec):
        info = storage.head(key)
        size = info.size_bytes
        if info.version is not None:
            return {"name": key, "size_bytes": size, "version": info.version}
        head = storage.get_range(key, 0, min(size, _PROBE_BYTES))
        tail = storage.get_range(key, max(0, size - _PROBE_BYTES), size)
    return {"name": key, "size_bytes": size, "probe": hashlib.sha256(head + tail).hexdigest()}


def stamp_of(files: Iterable[ObjectInfo]) -> str | None:
    """See `Source.stamp`."""
    told = [f"{file.key} {file.size_bytes} {file.modified}" for file in files if file.modified is not None]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32] if told else None


def _changed(key: str) -> SourceError:
    return SourceError(
        f"{key} was written while it was read: what was read of it may be of neither version; wait until it is whole, "
        "or copy it, and ingest again"
    )


@contextmanager
def _told(spec: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise SourceError(f"{spec}: {error}") from error


class _Counted:
    """A file read in any order: how much of it was read says more of the progress than the place it stands at."""

    def __init__(self, inner: BinaryIO) -> None:
        self._inner = inner
        self.count = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._inner.read(size)
        self.count += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


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

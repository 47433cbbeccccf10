"""The journal of an ingest under way: one marker object a block, folded into the manifest at the end.

Recording a block is one small put, whatever came before it. The same on a local folder and on an object store, which
cannot append. A marker is written after its block and index, so a marked block is a whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import orjson

from penstock.blocks.manifest import BlockEntry, DatasetHeader, SkippedRow
from penstock.errors import BlockStoreError, ObjectNotFound, PreconditionFailed
from penstock.sources import Cursor
from penstock.storage import LocalStorage, Storage

PREFIX = ".ingest/"
_HEADER_KEY = PREFIX + "header.json"
_AT_ONCE = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMarker:
    """A finished block, and where its source goes on."""

    entry: BlockEntry
    cursor: Cursor
    skipped_count: int = 0
    """Bad rows left out of the whole data set up to here."""
    skipped_rows: list[SkippedRow] = field(default_factory=list)
    """Those of this block, as far as they are listed."""
    stamp: str | None = None
    """`Source.stamp` of the files this block was read from."""


class Journal:
    """Reads and writes the markers of one data set."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def begin(self, header: DatasetHeader) -> DatasetHeader:
        """Begin a journal; returns the header it has, another writer's where that one was first."""
        try:
            put_once(self._storage, _HEADER_KEY, orjson.dumps(asdict(header)))
        except PreconditionFailed:
            return self.header() or header
        return header

    def header(self) -> DatasetHeader | None:
        """The header of the ingest under way, or None where none is."""
        return self._read(_HEADER_KEY, lambda fields: DatasetHeader(**fields))

    def record(self, marker: BlockMarker) -> None:
        self._storage.put(_key(marker.entry.block_id), orjson.dumps(asdict(marker)))

    def marker(self, block_id: int) -> BlockMarker | None:
        """The marker of one block, or None while the block is not there. Costs the same for every block."""
        return self._read(_key(block_id), _marker_from)

    def markers(self) -> list[BlockMarker]:
        """All markers from block 0 on, up to the first that is missing."""
        found: list[BlockMarker] = []
        if isinstance(self._storage, LocalStorage):
            while (marker := self.marker(len(found))) is not None:
                found.append(marker)
            return found
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # far away, one after the other would take a while
            while len(found) % _AT_ONCE == 0:
                several = pool.map(self.marker, range(len(found), len(found) + _AT_ONCE))
                there = list(takewhile(lambda marker: marker is not None, several))
                if not there:
                    break
                found += [marker for marker in there if marker is not None]
        return found

    def forget(self, markers: Sequence[BlockMarker]) -> None:
        """Drop the last blocks of an ingest under way, the latest first: a crash in between leaves a journal."""
        for marker in reversed(markers):
            self._storage.delete(_key(marker.entry.block_id))
            self._storage.delete(marker.entry.file)
            self._storage.delete(marker.entry.index_file)

    def remove(self) -> None:
        """Drop the journal once the manifest stands; the header last, so that a crash in between is seen."""
        for info in list(self._storage.list(PREFIX)):
            if info.key != _HEADER_KEY:
                self._storage.delete(info.key)
        self._storage.delete(_HEADER_KEY)

    def _read(self, key: str, make: Callable[[dict[str, Any]], T]) -> T | None:
        try:
            return make(orjson.loads(self._storage.get(key)))
        except ObjectNotFound:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BlockStoreError(
                f"{self._storage.url}/{key} is damaged ({type(error).__name__}: {error}): "
                "ingest again into a new folder"
            ) from error


def put_once(storage: Storage, key: str, data: bytes) -> None:
    """Write what is written once, under the writer's lock; `PreconditionFailed` where it is there already.

    A local lock ends with its holder, so no condition is needed (nor hard links, which some file systems have not). One
    on an object store may have been lost unnoticed: the condition is what keeps two writers apart.
    """
    if isinstance(storage, LocalStorage):
        storage.put(key, data)
    else:
        storage.put_if_absent(key, data)


def _key(block_id: int) -> str:
    return f"{PREFIX}block_{block_id:05d}.json"


def _marker_from(fields: dict[str, Any]) -> BlockMarker:
    return BlockMarker(
        entry=BlockEntry(**fields["entry"]),
        cursor=Cursor(**fields["cursor"]),
        skipped_count=fields["skipped_count"],
        skipped_rows=[SkippedRow(**row) for row in fields["skipped_rows"]],
        stamp=fields.get("stamp"),
    )

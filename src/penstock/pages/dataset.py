"""PagedDataset: where a Parquet data set is, what it holds, and what is known of its shards."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blocks import cache_folder
from penstock.errors import AccessDenied, ObjectNotFound, PreconditionFailed, SourceError
from penstock.pages.catalog import LARGEST_METADATA_BYTES, METADATA_KEY, SIZES_KEY, Catalog, Shard, parse_catalog
from penstock.pages.data_pages import PagePlaces
from penstock.pages.footers import TAIL_BYTES, ColumnFacts, column_facts, read_footer
from penstock.pages.forking import renew_in_forks
from penstock.storage import EndpointStorage, LocalStorage, ObjectInfo, ObjectStorage, ReadableStorage
from penstock.storage.keys import TEMP_SUFFIX

if TYPE_CHECKING:
    from penstock.feed.token_store import TokenStore

_log = logging.getLogger(__name__)

FRESH_S = 10.0
"""For how long the index files count as looked at."""
_FACTS_BYTES = 64 << 20
_KEPT_PLACES = 64
_WORTH_KEEPING = 8


class PagedDataset:
    """A Parquet data set with its index files. Constructing does no I/O; safe for threads; pickles.

    The index files are kept in the cache folder under the data set's place and read again only where their ETags have
    changed. Of a shard, size and version are asked for once a loader; every range is then one of that very version (at
    several endpoints, of the one that each had when it was first asked). What a footer says of a column is kept in the
    cache folder too, under that version.
    """

    def __init__(self, storage: ReadableStorage, *, expected_id: str | None = None) -> None:
        self.storage = storage
        self._expected_id = expected_id
        self._catalog: tuple[Catalog, tuple[object, ...], float] | None = None
        self.bytes_read = 0
        """Of shards, by this process."""
        self._tail_bytes = TAIL_BYTES
        self.token_stores: dict[tuple[int, Path, int], TokenStore | None] = {}
        """Token caches of this data set that are open, by process, folder and budget."""
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Locks, and what they guard."""
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._facts: OrderedDict[tuple[str | int | None, ...], ColumnFacts] = OrderedDict()
        self._facts_bytes = 0
        self._places: OrderedDict[str, PagePlaces] = OrderedDict()

    def __reduce__(self) -> tuple[object, ...]:
        known = self._catalog[0].dataset_id if self._catalog is not None else self._expected_id
        return _rebuild, (self.storage, known)

    @property
    def where(self) -> str:
        return self.storage.url

    @property
    def told(self) -> str:
        """What tells this place from others: the URL with the endpoint."""
        if isinstance(self.storage, ObjectStorage):
            return self.storage.address.told
        return repr(self.storage) if isinstance(self.storage, EndpointStorage) else self.storage.url

    # -- the catalog ---------------------------------------------------------------------------------------------------

    def catalog(self, *, fresh: bool = False) -> Catalog:
        """What it holds; looked at once, and with `fresh` again where the last look is a while ago."""
        with self._looking:
            known = self._catalog
            if known is not None and (not fresh or time.monotonic() - known[2] < FRESH_S):
                return known[0]
            sizes, sizes_info = self._index_file(SIZES_KEY)
            metadata, metadata_info = self._metadata_file()
            if sizes is None:
                raise SourceError(
                    f"{self.where} has no {SIZES_KEY}, so what it holds is not known: write it with "
                    f"`penstock pages index {self.where}`, or check the place"
                )
            versions = (sizes_info, metadata_info, hashlib.sha256(sizes + b"\n" + (metadata or b"")).digest())
            if known is None or known[1] != versions:
                root = root_of(self.storage)
                catalog = parse_catalog(sizes, metadata, where=self.where, root=root, exists=self.storage.exists)
                self._refuse_another(catalog)
                with self._lock:
                    self._facts.clear()
                    self._facts_bytes = 0
            else:
                catalog = known[0]
            self._catalog = catalog, versions, time.monotonic()
            return catalog

    def _refuse_another(self, catalog: Catalog) -> None:
        if self._expected_id is not None and catalog.dataset_id != self._expected_id:
            raise SourceError(
                f"{self.where} is another data set now: expected {self._expected_id}, got {catalog.dataset_id}; its "
                "index was written again after the pages were chosen: choose pages anew"
            )

    def _metadata_file(self) -> tuple[bytes | None, object]:
        """`_metadata.yaml`; None where there is none, which S3 tells whoever may not list by refusing."""
        try:
            return self._index_file(METADATA_KEY)
        except AccessDenied as error:
            _log.warning("%s: going on without %s, all configs are taken", error, METADATA_KEY)
            return None, None

    def _index_file(self, key: str) -> tuple[bytes | None, object]:
        """An index file, from the cache where its version is still the same; and what tells it from others."""
        try:
            info = self.storage.head(key)
            if info.size_bytes > LARGEST_METADATA_BYTES:
                raise SourceError(
                    f"{self.where}/{key} has {info.size_bytes} bytes: expected {LARGEST_METADATA_BYTES} or fewer"
                )
            name = _hashed(self.told, key)
            if info.version is None:
                return self.storage.get(key), info
            head = f"{info.version} {info.size_bytes}\n".encode()
            kept = self._kept(name)
            if kept is not None and kept.startswith(head):
                return kept[len(head) :], info
            data, got = self.storage.get_with_info(key)
            self._keep(name, f"{got.version} {got.size_bytes}\n".encode() + data)
            return data, got
        except ObjectNotFound:
            return None, None

    # -- shards --------------------------------------------------------------------------------------------------------

    def info(self, shard: Shard) -> ObjectInfo:
        """Size and version of a shard, as it is now."""
        try:
            found = self.storage.head(shard.path)
        except ObjectNotFound as error:
            raise SourceError(
                f"{self.where}/{shard.path} is missing, and {SIZES_KEY} names it: restore it, or write the index "
                f"anew with `penstock pages index {self.where}`"
            ) from error
        if shard.size_bytes is not None and found.size_bytes != shard.size_bytes:
            raise SourceError(
                f"{self.where}/{shard.path} has {found.size_bytes} bytes, {SIZES_KEY} says {shard.size_bytes}: it "
                f"was written again; write the index anew with `penstock pages index {self.where}`"
            )
        return found

    def read(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Bytes of a shard, of the version that `info` tells of; never fewer than asked for."""
        if isinstance(self.storage, ObjectStorage | EndpointStorage):
            try:
                data = self.storage.get_range_of(info, start, stop)
            except PreconditionFailed as error:
                raise self._written_again(info) from error
        else:
            data = self.storage.get_range(info.key, start, stop)
            now = self.storage.head(info.key)
            if (now.size_bytes, now.modified) != (info.size_bytes, info.modified):
                raise self._written_again(info)
        if len(data) != stop - start:
            raise SourceError(
                f"{self.where}/{info.key}: asked for bytes {start} to {stop} of {info.size_bytes}, got {len(data)}"
            )
        with self._lock:
            self.bytes_read += len(data)
        return data

    def _written_again(self, info: ObjectInfo) -> SourceError:
        return SourceError(
            f"{self.where}/{info.key} was written again since it was first looked at: choose pages anew, with a new "
            "loader"
        )

    def facts(self, shard: Shard, column: str | None, info: ObjectInfo) -> ColumnFacts:
        """Where a column of a shard lies, in the version that `info` tells of. Of threads that want the same, one reads
        the footer."""
        key = shard.path, column, _version(info), info.size_bytes
        with self._lock:
            turn = self._turns.setdefault(shard.path, threading.Lock())
        with turn:
            with self._lock:
                found = self._facts.get(key)
                if found is not None:
                    self._facts.move_to_end(key)
                    return found
            found = self._read_facts(shard, column, info)
            with self._lock:
                self._facts[key] = found
                self._facts_bytes += found.nbytes
                while self._facts_bytes > _FACTS_BYTES and len(self._facts) > 1:
                    self._facts_bytes -= self._facts.popitem(last=False)[1].nbytes
            return found

    def _read_facts(self, shard: Shard, column: str | None, info: ObjectInfo) -> ColumnFacts:
        name = _hashed(self.told, shard.path, info.version or "", str(info.size_bytes), column or "", "facts")
        found = self._kept_facts(name) if info.version is not None else None
        if found is None:
            what = f"{self.where}/{shard.path}"
            metadata, raw = self.footer(info)
            found = column_facts(metadata, column, info.size_bytes, what, raw)
            if info.version is not None:
                self._keep(name, found.saved())
        if found.num_rows != shard.num_rows:
            raise SourceError(
                f"{self.where}/{shard.path} has {found.num_rows} rows, {SIZES_KEY} says {shard.num_rows}: write the "
                f"index anew with `penstock pages index {self.where}`"
            )
        return found

    @contextmanager
    def page_places(self, info: ObjectInfo, facts: ColumnFacts, group: int) -> Iterator[PagePlaces]:
        """What is known of a large column chunk's pages; whoever learns more of it does so alone, and it is kept."""
        key = _hashed(
            self.told, info.key, _version(info) or "", str(info.size_bytes), facts.column, str(group), "places"
        )
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            places = self._places.get(key)
            if places is None:
                places = self._found_places(key, info, facts, group)
            before = len(places)
            yield places
            with self._lock:
                self._places[key] = places
                self._places.move_to_end(key)
                while len(self._places) > _KEPT_PLACES:
                    self._places.popitem(last=False)
            if len(places) > before + _WORTH_KEEPING and info.version is not None:
                self._keep(key, places.as_array().astype("<i8").tobytes())

    def footer(self, info: ObjectInfo) -> tuple[Any, bytes]:
        """A shard's whole metadata, as pyarrow has it and as it is."""
        guess = min(info.size_bytes, self._tail_bytes)
        metadata, raw = read_footer(
            lambda start, stop: self.read(info, start, stop), info.size_bytes, f"{self.where}/{info.key}", guess
        )
        self._tail_bytes = max(TAIL_BYTES, len(raw) + len(raw) // 4)  # shards of one data set are alike
        return metadata, raw

    # -- the cache folder ----------------------------------------------------------------------------------------------

    def _kept_facts(self, name: str) -> ColumnFacts | None:
        kept = self._kept(name)
        try:
            return ColumnFacts.from_saved(kept) if kept is not None else None
        except (ValueError, TypeError):
            return None  # another version's, or damaged: made anew

    def _found_places(self, name: str, info: ObjectInfo, facts: ColumnFacts, group: int) -> PagePlaces:
        """By the chunk's offset index, where it has one; else as far as somebody has walked before."""
        start, index_at, index_size, has_dictionary = facts.groups[group, [1, 5, 6, 7]].tolist()
        if 0 < index_size <= LARGEST_METADATA_BYTES and 0 < index_at <= info.size_bytes - index_size:
            rows = int(facts.groups[group, 0]) - (int(facts.groups[group - 1, 0]) if group else 0)
            what = f"{self.where}/{info.key}, column {facts.column!r}, row group {group}"
            data = self.read(info, index_at, index_at + index_size)
            return PagePlaces.from_index(data, start, bool(has_dictionary), rows, what)
        kept = self._kept(name) if info.version is not None else None
        return PagePlaces(np.frombuffer(kept, dtype="<i8").reshape(-1, 3) if kept else None)

    def _kept(self, name: str) -> bytes | None:
        try:
            found = (_folder() / name).read_bytes()
        except OSError:  # mostly: not there
            return None
        digest, rest = found[:32], found[32:]
        return rest if hashlib.sha256(rest).digest() == digest else None

    def _keep(self, name: str, data: bytes) -> None:
        """Keep something that can be asked for again. Nothing is synced: what a power loss spoils is not taken."""
        path = _folder() / name
        temp = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{TEMP_SUFFIX}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temp.write_bytes(hashlib.sha256(data).digest() + data)
            temp.replace(path)
        except OSError as error:  # where nothing can be written, it is asked for each time
            _log.debug("%s is not kept: %s", path, error.strerror or error)


def _rebuild(storage: ReadableStorage, expected_id: str | None) -> PagedDataset:
    return PagedDataset(storage, expected_id=expected_id)


def _version(info: ObjectInfo) -> str | None:
    return info.version or info.modified


def _folder() -> Path:
    return cache_folder().expanduser().absolute() / "pages"


def _hashed(*parts: str) -> str:
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{name[:2]}/{name[2:40]}"


def root_of(storage: ReadableStorage) -> list[str]:
    """The folders a data set lies in, the bucket first."""
    if isinstance(storage, ObjectStorage):
        names = [] if storage.address.scheme == "http" else [storage.address.bucket]
        return [*names, *storage.address.prefix.split("/")] if storage.address.prefix else names
    if isinstance(storage, LocalStorage):
        return [part for part in storage.root.absolute().parts if part != "/"]
    if isinstance(storage, EndpointStorage):
        return root_of(storage.stores[0])
    return []

"""Raw files, folders and ``hf://`` data sets as block stores: kept in a cache folder, made by whoever comes first."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from penstock.blocks.cutting import IngestProgress
from penstock.blocks.ingesting import run_ingest
from penstock.blocks.manifest import DatasetHeader
from penstock.blocks.places import cache_folder, is_block_store, is_remote
from penstock.blocks.request import IngestRequest
from penstock.blocks.store import finished_manifest
from penstock.errors import AccessDenied, BlockStoreError, SourceError, StorageError
from penstock.sources import Source, open_source
from penstock.storage import LocalStorage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawDataset:
    """A raw source, and the block store in the cache that it becomes. Pickles; opening the source again gives the
    very version that was resolved."""

    spec: str
    store_path: Path
    header: DatasetHeader
    request: IngestRequest

    def open_source(self) -> Source:
        source = open_source(
            self.spec, exclude=self.store_path, options=self.request.options, pinned=self.header.revision
        )
        if is_remote(self.spec) and self.header.revision is None:
            found = self.request.header(source).dataset_id
            if found != self.header.dataset_id:
                raise SourceError(
                    f"{self.spec} has changed since it was opened (got {found}, expected {self.header.dataset_id}): "
                    "open it again, which takes it as it is now"
                )
        return source


def resolve_raw(spec: str, request: IngestRequest, cache: Path | None = None) -> RawDataset:
    """Find out what a raw source is, and which block store in the cache it becomes. Reads its first rows.

    A Hub that cannot be reached is no reason to stop where the whole data set is in the cache: then that is taken, with
    a warning.
    """
    root = (cache or cache_folder()).expanduser().absolute() / "blocks"
    known = LocalStorage(root.parent / "specs")
    key = hashlib.sha256(repr((spec, request)).encode()).hexdigest()[:32] + ".json"
    try:
        raw = _resolve(spec, request, root)
    except (SourceError, StorageError) as error:
        kept = _kept(spec, request, known, key) if spec.startswith("hf://") else None
        if kept is None:
            raise
        _log.warning("%s: taking the copy in the cache, of commit %s: %s", spec, kept.header.revision, error)
        return kept
    if spec.startswith("hf://"):
        known.put(key, orjson.dumps({"spec": spec, "store": raw.store_path.name}))
    return raw


def _resolve(spec: str, request: IngestRequest, root: Path) -> RawDataset:
    try:
        source = open_source(spec, exclude=root, options=request.options, want_text=request.wants_text)
    except SourceError as error:
        if spec.startswith("hf://"):
            raise
        raise BlockStoreError(
            f"{spec} is not a block store, and no source of one either ({error}): "
            f"make one with `penstock ingest SOURCE {spec}`, or name a file, a folder, a glob, hf://..., s3://... or https://..."
        ) from error
    header = request.header(source)
    name = re.sub(r"[^\w.-]", "_", header.dataset_name)[:60]
    # A file that was written again is another one here, though its size and its ends are the same.
    told = f"{header.dataset_id} {source.stamp(0, sys.maxsize)}"
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    return RawDataset(spec=spec, store_path=root / f"{name}-{digest}", header=header, request=request)


def _kept(spec: str, request: IngestRequest, known: LocalStorage, key: str) -> RawDataset | None:
    """The finished store that a spec became before."""
    if not known.exists(key):
        return None
    store_path = known.root.parent / "blocks" / str(orjson.loads(known.get(key))["store"])
    manifest = finished_manifest(LocalStorage(store_path))
    if manifest is None:
        return None
    return RawDataset(spec=spec, store_path=store_path, header=manifest.header, request=request)


def prepare_blocks(
    spec: str | os.PathLike[str],
    samples_per_block: int = 100_000,
    *,
    on_progress: Callable[[IngestProgress], None] | None = None,
) -> str:
    """The path of a block store with this data: the one named, or one in the cache, which is made or finished first."""
    text = os.fspath(spec)
    if is_block_store(text):
        return text
    raw = resolve_raw(text, IngestRequest(block_size=samples_per_block))
    storage = LocalStorage(raw.store_path)
    if finished_manifest(storage) is None:
        try:
            run_ingest(storage, raw.open_source(), raw.header, raw.request.on_bad_row, on_progress)
        except AccessDenied as error:
            raise AccessDenied(
                f"blocks of {text} go to the cache folder {raw.store_path.parent.parent}, which cannot be written "
                f"({error.__cause__ or error}): name another with PENSTOCK_CACHE, or make a block store of it yourself "
                f"(`penstock ingest {text} DEST`)"
            ) from error
    return str(raw.store_path)

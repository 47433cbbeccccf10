"""What an ingest is asked for, and the identity of the data set that comes out of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Literal

import orjson

from penstock.blocks.journal import Journal
from penstock.blocks.manifest import DatasetHeader, Manifest
from penstock.blocks.store import finished_manifest
from penstock.errors import ConfigError, SourceError
from penstock.sources import Cursor, ReadOptions, Source, open_source, pick_columns
from penstock.storage import LocalStorage, Storage

OnBadRow = Literal["stop", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestRequest:
    """How a source becomes blocks. See `ingest` for what each part means."""

    block_size: int = 100_000
    block_bytes: int | None = None
    text_column: str | None = None
    token_column: str | None = None
    no_text: bool = False
    on_bad_row: OnBadRow = "stop"
    dataset_name: str | None = None
    options: ReadOptions = field(default_factory=ReadOptions)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size} cannot hold a sample: expected 1 or more")
        if self.block_bytes is not None and self.block_bytes < 1:
            raise ConfigError(f"block_bytes={self.block_bytes} cannot hold a sample: expected 1 or more, or none")
        if self.on_bad_row not in ("stop", "skip"):
            raise ConfigError(f"on_bad_row={self.on_bad_row!r} is unknown: expected 'stop' or 'skip'")
        chosen = [name for name in ("text_column", "token_column", "no_text") if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other: choose one")

    def open(self, spec: str | os.PathLike[str], dest: Storage | None) -> Source:
        """Open the source; in the version `dest` was begun with, where it was begun with this very source."""
        begun = _begun(dest) if dest is not None else None
        pinned = begun.revision if begun is not None and begun.source == os.fspath(spec) else None
        return open_source(
            spec,
            exclude=dest.root if isinstance(dest, LocalStorage) else dest.url if dest is not None else None,
            options=self.options,
            pinned=pinned,
            want_text=self.wants_text,
        )

    @property
    def wants_text(self) -> bool:
        """Whether text is expected without the user having said where."""
        return not self.no_text and not self.text_column and not self.token_column

    def finished(self, spec: str | os.PathLike[str], dest: Storage) -> Manifest | None:
        """What is at `dest`, where that is this very Hub data set, complete: a commit does not change, so the Hub need
        not be asked."""
        found = finished_manifest(dest)
        if found is None or found.header.revision is None or found.header.source != os.fspath(spec):
            return None
        if Journal(dest).header() is not None:
            return None  # its writer was killed before it had tidied up
        theirs = found.header
        shape = (theirs.block_size, theirs.block_bytes) == (self.block_size, self.block_bytes)
        columns = (self.no_text, self.text_column, self.token_column) in (
            (False, None, None),
            (False, theirs.text_column, theirs.token_column),
            (theirs.text_column is None and theirs.token_column is None, None, None),
        )
        named = self.dataset_name in (None, theirs.dataset_name)
        return found if shape and columns and named and self.options == ReadOptions() else None

    def header(self, source: Source) -> DatasetHeader:
        """The data set's identity: known before its first block. Reads the first rows, to find the columns."""
        text_column, token_column = (None, None) if self.no_text else self._columns(source)
        shape = {"block_size": self.block_size, "block_bytes": self.block_bytes, "text_column": text_column}
        # Only what differs from the usual is told, so that an option added later changes no identity.
        extra = {"token_column": token_column} if token_column else {}
        identity = {"version": 1, "revision": source.revision(), **shape, **extra}
        digest = hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS))
        return DatasetHeader(
            dataset_name=self.dataset_name or source.name,
            source=source.spec,
            revision=source.pinned,
            dataset_id="sha256:" + digest.hexdigest(),
            token_column=token_column,
            **shape,
        )

    def _columns(self, source: Source) -> tuple[str | None, str | None]:
        for batch in source.batches(Cursor()):
            if batch.values:
                try:
                    return pick_columns(batch.values, text=self.text_column, tokens=self.token_column)
                except SourceError as error:
                    raise SourceError(f"{batch.file_name}: {error}") from None
        return (None, self.token_column) if self.token_column else (self.text_column or "text", None)


def _begun(dest: Storage) -> DatasetHeader | None:
    """The header of what is at `dest` already, finished or not."""
    finished = finished_manifest(dest)
    return finished.header if finished is not None else Journal(dest).header()

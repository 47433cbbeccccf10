"""Rows of a Hub repository as `datasets` streams them: for layouts the readers of this package do not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import SourceError
from penstock.sources.base import Cursor, RowBatch
from penstock.sources.columnar import BATCH_ROWS, rows_of
from penstock.sources.files import probe, stamp_of
from penstock.sources.hub_files import Chosen, repository_path
from penstock.storage import HubStorage, ReadableStorage
from penstock.storage.web import redacted


class StreamedSource:
    """A config and a split, streamed row by row. Going on from a cursor reads up to there again."""

    def __init__(self, *, spec: str, name: str, storage: ReadableStorage, chosen: Chosen) -> None:
        self._spec = spec
        self._name = name
        self._storage = storage
        self._chosen = chosen

    @property
    def spec(self) -> str:
        return self._spec

    @property
    def name(self) -> str:
        return self._name

    @property
    def pinned(self) -> str | None:
        return self._storage.commit if isinstance(self._storage, HubStorage) else None

    def stamp(self, first: int, last: int) -> str | None:
        return stamp_of(self._storage.head(key) for key in self._chosen.keys)

    def revision(self) -> dict[str, Any]:
        chosen = self._chosen
        return {
            "kind": "streamed",
            "config": chosen.config,
            "split": chosen.split,
            "settings": chosen.settings,
            "files": [probe(self._storage, key, self._spec) for key in chosen.keys],
        }

    def batches(self, cursor: Cursor) -> Iterator[RowBatch]:
        taken = cursor.row + cursor.skip
        place = f"{self._name}[{self._chosen.split}]"
        for table in self._tables(place, taken):
            for batch in table.combine_chunks().to_batches():
                yield rows_of(batch, place, Cursor(row=taken))
                taken += batch.num_rows

    def size_bytes(self) -> None:
        return None

    def position_bytes(self, cursor: Cursor) -> None:
        return None

    def _tables(self, place: str, skip: int) -> Iterator[Any]:
        import datasets

        try:
            rows: Any = datasets.load_dataset(
                repository_path(self._storage),
                self._chosen.config,
                split=self._chosen.split,
                revision=self.pinned,
                streaming=True,
            )
            at_a_time = BATCH_ROWS if self._chosen.in_tables else 1
            for table in rows.skip(skip).with_format("arrow").iter(batch_size=at_a_time):
                skip += table.num_rows
                yield table
        except Exception as error:
            reason = redacted(f"{type(error).__name__}: {error}")
            raise SourceError(f"{place}: cannot be read after row {skip}: {reason}") from error

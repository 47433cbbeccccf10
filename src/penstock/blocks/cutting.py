"""Cuts a source into blocks under the writer's lock: begins, goes on, or finds everything done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.blocks.journal import PREFIX, BlockMarker, Journal, put_once
from penstock.blocks.manifest import MANIFEST_KEY, BlockEntry, DatasetHeader, Manifest, SkippedRow
from penstock.blocks.request import OnBadRow
from penstock.blocks.store import finished_manifest, read_manifest
from penstock.blocks.verify import damage_of, sizes_of_blocks
from penstock.blocks.writer import BlockWriter
from penstock.errors import BadRowError, BlockStoreError, CorruptBlockError, PreconditionFailed, differences
from penstock.sources import BadRow, Cursor, RowBatch, Source, set_textless_rows_aside, set_tokenless_rows_aside
from penstock.storage import StillHeld, Storage

_log = logging.getLogger(__name__)

LISTED_SKIPPED_ROWS = 1000
"""How many skipped rows a manifest lists by name; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestProgress:
    """How far an ingest is; handed to the caller's callback now and then."""

    state: Literal["resumed", "running", "complete", "already complete"]
    samples: int
    blocks: int
    skipped: int
    bytes_read: int | None
    bytes_total: int | None


class BlockCutter:
    """One ingest under the writer's lock.

    Where that lock is a lease, it may be lost unnoticed for a moment. Then two writers of the same data write the same
    bytes; header and manifest are put on condition that there is none, so that a writer of other data is refused.
    """

    def __init__(
        self,
        storage: Storage,
        source: Source,
        header: DatasetHeader,
        on_bad_row: OnBadRow,
        on_progress: Callable[[IngestProgress], None] | None,
        still_held: StillHeld = lambda: None,
    ) -> None:
        self._storage = storage
        self._still_held = still_held
        self._source = source
        self._header = header
        self._on_bad_row = on_bad_row
        self._on_progress = on_progress
        self._journal = Journal(storage)
        self._entries: list[BlockEntry] = []
        self._writer: BlockWriter | None = None
        self._cursor = Cursor()
        self._first_file = 0
        self._skipped_count = 0
        self._skipped: list[SkippedRow] = []
        self._listed_before = 0

    def run(self) -> Manifest:
        for prefix in ("blocks/", PREFIX, MANIFEST_KEY):  # other parts of the data set have other writers
            self._storage.discard_unfinished(prefix)
        if self._storage.exists(MANIFEST_KEY) or not self._resume_or_begin():
            return self._already_complete()
        try:
            for batch in self._source.batches(self._cursor):
                self._take(batch)
                self._report("running", batch.start)
            if self._writer is not None:
                self._close_block(self._cursor)
        except BaseException as error:
            if self._writer is not None:
                self._writer.__exit__(type(error), error, error.__traceback__)
            raise
        manifest = self._manifest()
        self._seal(manifest.to_json())
        self._journal.remove()
        if not manifest.total_samples:
            _log.warning("%s holds no samples: %s is complete and empty", self._source.spec, self._storage.url)
        self._report("complete", None)
        return manifest

    def found_complete(self) -> Manifest | None:
        """The manifest of this very data set, complete and tidied up; None where there is none. Writes nothing."""
        finished = finished_manifest(self._storage)
        if finished is None or self._journal.header() is not None:
            return None
        return self._already_complete(tidy_up=False)

    def _seal(self, manifest: bytes) -> None:
        """Make the data set complete, unless another writer did so with the very same bytes."""
        self._still_held()
        try:
            put_once(self._storage, MANIFEST_KEY, manifest)
        except PreconditionFailed as error:
            if self._storage.get(MANIFEST_KEY) != manifest:
                raise BlockStoreError(
                    f"{self._storage.url} was finished meanwhile by another writer, and not with the same data: see "
                    f"what is there with `penstock inspect {self._storage.url} --verify`, and choose another folder"
                ) from error

    def _already_complete(self, *, tidy_up: bool = True) -> Manifest:
        manifest = read_manifest(self._storage)
        self._refuse_other(manifest.header)
        refuse_damaged(self._storage, manifest)
        if tidy_up:
            self._journal.remove()
        self._entries = manifest.blocks
        self._skipped_count = manifest.skipped_count
        self._report("already complete", None)
        return manifest

    def _resume_or_begin(self) -> bool:
        """Whether there is something left to do; False where another writer has finished meanwhile."""
        begun = self._journal.header()
        if begun is None and any(True for prefix in ("blocks/", PREFIX) for _ in self._storage.list(prefix)):
            begun = self._journal.header()  # another writer may have begun in between, or be through
            if begun is None and self._storage.exists(MANIFEST_KEY):
                return False
            if begun is None:
                raise BlockStoreError(
                    f"{self._storage.url} has a blocks or {PREFIX} folder but neither manifest nor journal: "
                    "it is not a block store that penstock began; choose another folder"
                )
        if begun is None:
            begun = self._journal.begin(self._header)
            if begun == self._header:
                return True
        self._refuse_other(begun)
        self._header = begun
        markers = self._sound(self._journal.markers())
        self._entries = [marker.entry for marker in markers]
        self._skipped = [row for marker in markers for row in marker.skipped_rows]
        self._listed_before = len(self._skipped)
        if markers:
            self._cursor = markers[-1].cursor
            self._first_file = self._cursor.file
            self._skipped_count = markers[-1].skipped_count
        self._report("resumed", self._cursor)
        return True

    def _sound(self, markers: list[BlockMarker]) -> list[BlockMarker]:
        """The first blocks of an ingest begun before that are still what they were, from files that are; drops the
        others, to write them again."""
        first_file = 0
        sizes = sizes_of_blocks(self._storage) if markers else {}
        for number, marker in enumerate(markers):
            problem = damage_of(sizes, marker.entry)
            stamp = self._source.stamp(first_file, marker.cursor.file)
            if not problem and marker.stamp is not None and stamp != marker.stamp:
                problem = "the files it was read from were written since"
            if problem:
                _log.warning(
                    "%s: block %d and what follows is written again: %s",
                    self._storage.url,
                    marker.entry.block_id,
                    problem,
                )
                self._journal.forget(markers[number:])
                return markers[:number]
            first_file = marker.cursor.file
        return markers

    def _refuse_other(self, theirs: DatasetHeader) -> None:
        got, expected = asdict(self._header), asdict(theirs)
        for name in ("source", "revision"):  # how the user spelled it does not matter, nor a commit beside the data
            del got[name], expected[name]
        if got == expected:
            return
        different = differences(got, expected)
        what = "; ".join(different)
        only_content = len(different) == 1 and different[0].startswith("dataset_id")
        raise BlockStoreError(
            f"{self._storage.url} holds another data set: {what}"
            + (" (its files have changed, or other files are taken)" if only_content else "")
            + ": choose another folder, or repeat the command it was begun with"
        )

    def _take(self, batch: RowBatch) -> None:
        """Append a batch's rows, closing blocks as they fill."""
        if self._header.text_column is not None:
            set_textless_rows_aside(batch, self._header.text_column)
        elif self._header.token_column is not None:
            set_tokenless_rows_aside(batch, self._header.token_column)
        end = len(batch.lines)
        stop_at = batch.bad[0] if batch.bad and self._on_bad_row == "stop" else None
        if stop_at is not None:
            end = stop_at.before
        taken = noted = 0
        while taken < end:
            if self._writer is None:
                start_index = self._entries[-1].end_index if self._entries else 0
                self._writer = BlockWriter(self._storage, len(self._entries), start_index).__enter__()
            count = self._room(batch.lines, taken, end)
            self._writer.append(batch.lines[taken : taken + count])
            taken += count
            while noted < len(batch.bad) and batch.bad[noted].before < taken:
                self._note_skipped(batch.bad[noted])
                noted += 1
            if self._is_full():
                self._close_block(batch.cursor_after(taken))
        if stop_at is not None:
            raise BadRowError(
                f"{stop_at.position}: {stop_at.reason}: pass --on-bad-row skip (in Python on_bad_row='skip', to ingest "
                f"or BlockManager) to go on without such rows (the {len(self._entries)} blocks before it are kept), or "
                "mend the row and ingest into a new folder"
            )
        for row in batch.bad[noted:]:
            self._note_skipped(row)
        self._cursor = batch.start.plus(len(batch.lines) + len(batch.bad))

    def _room(self, lines: list[bytes], taken: int, end: int) -> int:
        """How many of the next lines belong into the open block; at least one."""
        assert self._writer is not None
        count = min(end - taken, self._header.block_size - self._writer.sample_count)
        if self._header.block_bytes is None:
            return count
        size = self._writer.size_bytes
        for place in range(count):
            size += len(lines[taken + place])
            if size >= self._header.block_bytes:
                return place + 1
        return count

    def _is_full(self) -> bool:
        assert self._writer is not None
        if self._writer.sample_count >= self._header.block_size:
            return True
        return self._header.block_bytes is not None and self._writer.size_bytes >= self._header.block_bytes

    def _close_block(self, cursor: Cursor) -> None:
        assert self._writer is not None
        writer, self._writer = self._writer, None
        self._still_held()
        writer.__exit__(None, None, None)
        entry = writer.finish()
        listed = self._skipped[self._listed_before :]
        self._journal.record(
            BlockMarker(
                entry=entry,
                cursor=cursor,
                skipped_count=self._skipped_count,
                skipped_rows=listed,
                stamp=self._source.stamp(self._first_file, cursor.file),
            )
        )
        self._listed_before = len(self._skipped)
        self._first_file = cursor.file
        self._entries.append(entry)

    def _note_skipped(self, row: BadRow) -> None:
        self._skipped_count += 1
        if len(self._skipped) < LISTED_SKIPPED_ROWS:
            self._skipped.append(SkippedRow(position=row.position, reason=row.reason))

    def _manifest(self) -> Manifest:
        return Manifest(
            header=self._header,
            complete=True,
            blocks=self._entries,
            skipped_count=self._skipped_count,
            skipped_rows=self._skipped,
        )

    def _report(self, state: Any, cursor: Cursor | None) -> None:
        if self._on_progress is None:
            return
        total = self._source.size_bytes()
        open_samples = self._writer.sample_count if self._writer else 0
        self._on_progress(
            IngestProgress(
                state=state,
                samples=(self._entries[-1].end_index if self._entries else 0) + open_samples,
                blocks=len(self._entries),
                skipped=self._skipped_count,
                bytes_read=total if cursor is None else self._source.position_bytes(cursor),
                bytes_total=total,
            )
        )


def refuse_damaged(storage: Storage, manifest: Manifest) -> None:
    """Refuse a complete store whose blocks have other sizes than they should."""
    sizes = sizes_of_blocks(storage)
    for entry in manifest.blocks:
        if problem := damage_of(sizes, entry):
            raise CorruptBlockError(
                f"{storage.url} is complete, but {problem}: restore it, or ingest again into a new folder"
            )

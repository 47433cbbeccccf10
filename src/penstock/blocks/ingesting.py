"""From a source to a block store: resumable, and byte-identical however often it was interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from penstock.blocks.cutting import BlockCutter, IngestProgress, refuse_damaged
from penstock.blocks.journal import PREFIX
from penstock.blocks.manifest import DatasetHeader, Manifest
from penstock.blocks.request import IngestRequest, OnBadRow
from penstock.errors import AccessDenied
from penstock.sources import ReadOptions, Source
from penstock.storage import StillHeld, Storage, open_storage

WRITER = PREFIX + "writer"
"""Name of the lock that a store's writer holds."""


def ingest(
    source: str | os.PathLike[str] | Source,
    dest: str | os.PathLike[str],
    block_size: int = 100_000,
    block_bytes: int | None = None,
    *,
    text_column: str | None = None,
    token_column: str | None = None,
    no_text: bool = False,
    on_bad_row: OnBadRow = "stop",
    encoding: str | None = None,
    whole_files: bool = False,
    tokens_per_sample: int | None = None,
    token_dtype: str | None = None,
    dataset_name: str | None = None,
    on_progress: Callable[[IngestProgress], None] | None = None,
) -> Manifest:
    """Write `source` as a block store at `dest`, or finish one begun earlier with the same source and options.

    Args:
        source: A file, a folder, a glob, ``hf://name[:config[:split]]``, ``s3://bucket/prefix``, ``https://server/file``,
            or an open `Source`.
        dest: Where the block store goes: a folder, or ``s3://bucket/prefix``.
        block_size: Samples a block; a block also closes once it holds `block_bytes`.
        block_bytes: Bytes after which a block closes, so that huge rows make small blocks.
        text_column: The column holding the text; found by name where not given.
        token_column: The column holding token ids, where the source came tokenised; ``input_ids`` is found by itself
            where there is no text.
        no_text: Store rows of any modality; `get_rows` works on them, `get_chunk` refuses.
        on_bad_row: ``stop`` raises at the first bad row, with all blocks before it kept; ``skip`` counts and lists
            them.
        encoding: Encoding of text files; UTF-8 where not given.
        whole_files: Make one sample of each .txt file instead of one of each line.
        tokens_per_sample: How many tokens of a .bin or flat .npy file make a sample; 2048 where not given.
        token_dtype: What numbers a .bin file holds; uint16 where neither this nor the file says.
        dataset_name: Defaults to the source's stem.
        on_progress: Called as the ingest goes.

    Returns:
        The manifest of the complete data set.

    Costs one pass over the source and memory for one batch of rows plus one block's index. Running it again on a
    complete store changes nothing. Two writers on one store: the second gets `StorageBusy`.
    """
    request = IngestRequest(
        block_size=block_size,
        block_bytes=block_bytes,
        text_column=text_column,
        token_column=token_column,
        no_text=no_text,
        on_bad_row=on_bad_row,
        dataset_name=dataset_name,
        options=ReadOptions(
            encoding=encoding,
            whole_files=whole_files,
            tokens_per_sample=tokens_per_sample,
            token_dtype=token_dtype,
        ),
    )
    storage = open_storage(dest)
    if isinstance(source, str | os.PathLike):
        if (finished := request.finished(source, storage)) is not None:
            refuse_damaged(storage, finished)
            if on_progress is not None:
                on_progress(_progress_of(finished))
            return finished
        source = request.open(source, storage)
    return run_ingest(storage, source, request.header(source), on_bad_row, on_progress)


def run_ingest(
    storage: Storage,
    source: Source,
    header: DatasetHeader,
    on_bad_row: OnBadRow,
    on_progress: Callable[[IngestProgress], None] | None,
) -> Manifest:
    """Write or finish the data set that `header` describes, as the store's only writer."""
    with ExitStack() as stack:
        try:
            still_held = stack.enter_context(storage.exclusive(WRITER, purpose="ingesting"))
        except AccessDenied as error:
            found = BlockCutter(storage, source, header, on_bad_row, on_progress).found_complete()
            if found is not None:
                return found
            raise AccessDenied(f"{storage.url} cannot be written, and nothing was: {error}") from error
        return write_blocks(storage, source, header, on_bad_row, on_progress, still_held)


def write_blocks(
    storage: Storage,
    source: Source,
    header: DatasetHeader,
    on_bad_row: OnBadRow,
    on_progress: Callable[[IngestProgress], None] | None,
    still_held: StillHeld,
) -> Manifest:
    """`run_ingest` for a caller that holds the lock `WRITER` of the store; `still_held` is what that gave."""
    return BlockCutter(storage, source, header, on_bad_row, on_progress, still_held).run()


def process_raw_dataset_to_blocks(
    input_path: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dataset_name: str | None = None,
    block_size: int = 100_000,
) -> dict[str, Any]:
    """Cut a raw data set into blocks; returns the manifest as a dict. The small face of `ingest`."""
    return ingest(input_path, output_dir, block_size, dataset_name=dataset_name).as_dict()


def _progress_of(finished: Manifest) -> IngestProgress:
    return IngestProgress(
        state="already complete",
        samples=finished.total_samples,
        blocks=finished.total_blocks,
        skipped=finished.skipped_count,
        bytes_read=None,
        bytes_total=None,
    )

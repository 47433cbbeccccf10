"""`penstock ingest` and `penstock inspect`."""

from __future__ import annotations

import time
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import CHECK_FAILED, console, counted, human_bytes, print_facts, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.blocks import BlockStore, IngestProgress, Manifest

_LINE_EVERY_S = 10.0
"""How often progress is told where there is no terminal to draw a bar on."""


class OnBadRow(StrEnum):
    stop = "stop"
    skip = "skip"


def ingest(
    source: Annotated[
        str,
        typer.Argument(help="A file, a folder, a glob, hf://name[:config[:split]], s3://... or https://server/file."),
    ],
    dest: Annotated[str, typer.Argument(help="The folder the block store goes to, or s3://bucket/prefix.")],
    block_size: Annotated[int, typer.Option(help="Samples a block.")] = 100_000,
    block_bytes: Annotated[int | None, typer.Option(help="Bytes after which a block closes as well.")] = None,
    text_column: Annotated[str | None, typer.Option(help="The column that holds the text.")] = None,
    token_column: Annotated[str | None, typer.Option(help="The column of token ids, if it came tokenised.")] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="Store rows of any kind, not for training.")] = False,
    on_bad_row: Annotated[OnBadRow, typer.Option(help="What to do with a row that cannot be used.")] = OnBadRow.stop,
    encoding: Annotated[str | None, typer.Option(help="Encoding of text files; else UTF-8.")] = None,
    whole_files: Annotated[bool, typer.Option("--whole-files", help="A .txt file is one sample.")] = False,
    tokens_per_sample: Annotated[int | None, typer.Option(help="Tokens a sample, of flat token files.")] = None,
    token_dtype: Annotated[str | None, typer.Option(help="Numbers of a .bin file; else uint16.")] = None,
    name: Annotated[str | None, typer.Option(help="The data set's name; else the source's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Write a source as a block store, or finish one that was interrupted."""
    from penstock.blocks import ingest as ingest_source

    with ingest_bar(quiet=as_json) as on_progress:
        manifest = ingest_source(
            source,
            dest,
            block_size,
            block_bytes,
            text_column=text_column,
            token_column=token_column,
            no_text=no_text,
            on_bad_row=on_bad_row.value,
            encoding=encoding,
            whole_files=whole_files,
            tokens_per_sample=tokens_per_sample,
            token_dtype=token_dtype,
            dataset_name=name,
            on_progress=on_progress,
        )
    if as_json:
        print_json(manifest.as_dict())
    else:
        _print_manifest(manifest, dest)


def inspect(
    dest: Annotated[str, typer.Argument(help="A block store, here or on s3://bucket/prefix.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and name every bad file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest's fields as JSON.")] = False,
) -> None:
    """Show what a block store holds, and whether it is sound."""
    from penstock.blocks import BlockStore

    store = BlockStore.open(dest)
    damages = _verify(store, quiet=as_json) if verify else []
    if as_json:
        extra = {"damaged": [{"file": file, "reason": reason} for file, reason in damages]} if verify else {}
        print_json({**store.manifest.as_dict(), **extra})
    else:
        _print_manifest(store.manifest, dest)
        for file, reason in damages:
            console(stderr=True).print(f"bad {dest}/{file}: {reason}", style="red")
        if verify and not damages:
            console().print("every file is what was written")
    if damages:
        raise typer.Exit(CHECK_FAILED)


@contextmanager
def ingest_bar(*, quiet: bool) -> Iterator[Callable[[IngestProgress], None] | None]:
    """A progress bar on stderr: samples, MB/s, time left."""
    if quiet:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    screen = console(stderr=True)
    columns = (
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        said_at = time.monotonic()

        def on_progress(progress: IngestProgress) -> None:
            nonlocal said_at
            told = f"{counted(progress.samples, 'sample')} in {counted(progress.blocks, 'block')}"
            bar.update(task, total=progress.bytes_total, completed=progress.bytes_read or 0, description=told)
            if not screen.is_terminal and time.monotonic() - said_at > _LINE_EVERY_S:
                said_at = time.monotonic()
                screen.print(told)
            if progress.state == "resumed":
                screen.print(f"going on behind {counted(progress.blocks, 'block')} there already")
            elif progress.state == "already complete":
                screen.print("already complete: nothing to do")

        yield on_progress


def _verify(store: BlockStore, *, quiet: bool) -> list[tuple[str, str]]:
    from rich.progress import Progress

    from penstock.blocks import verify_blocks

    found = []
    screen = console(stderr=True)
    with Progress(console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task("verifying", total=len(store.manifest.blocks))
        for _, damages in verify_blocks(store):
            found += [(damage.file, damage.reason) for damage in damages]
            bar.advance(task)
    return found


def _print_manifest(manifest: Manifest, dest: str) -> None:
    header = manifest.header
    print_facts(
        f"{header.dataset_name} in {dest}",
        {
            "source": header.source,
            "samples": f"{manifest.total_samples:,}",
            "blocks": f"{len(manifest.blocks):,} of up to {counted(header.block_size, 'sample')}",
            "size": human_bytes(sum(block.size_bytes for block in manifest.blocks)),
            **({"revision": header.revision} if header.revision else {}),
            **({"token column": header.token_column} if header.token_column else {}),
            "text column": header.text_column or "none",
            "skipped rows": manifest.skipped_count,
            "complete": "yes" if manifest.complete else "no: run the same ingest again to finish it",
            "data set id": header.dataset_id,
            "fingerprint": manifest.fingerprint,
        },
    )
    for row in manifest.skipped_rows[:10]:
        console().print(f"  skipped {row.position}: {row.reason}")

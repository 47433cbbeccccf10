"""`penstock bench storage`: pages from a bucket under several settings, each in a process of its own."""

from __future__ import annotations

import csv
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import console, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r}: expected whole numbers above 0, separated by commas", param_hint=option)
    return [int(part) for part in parts]


def storage(
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, a folder with one, a tiktoken file or a Hub name.")],
    dataset: Annotated[
        str | None, typer.Argument(help="s3://..., https://... or a folder of Parquet; else the environment's bucket.")
    ] = None,
    pages: Annotated[int, typer.Option(min=1, help="Pages a measurement.")] = 12,
    rows: Annotated[int, typer.Option(min=1, help="Rows a page.")] = 100,
    requests: Annotated[str, typer.Option(help="Concurrent requests; several: 1,4,8.")] = "1,4,8",
    batch_size: Annotated[str, typer.Option(help="Sequences a batch; several: 8,32.")] = "8",
    sequence_length: Annotated[str, typer.Option(help="Tokens a sequence; several: 1024,2048.")] = "2048",
    buffer_mb: Annotated[str, typer.Option(help="MB of a request at most; several: 1,4.")] = "4",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the choice of pages.")] = 0,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them there, an SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Load pages as a training would, under every combination of the settings, and say how fast: loading included.

    Every measurement is a process of its own, reads other pages than the one before, and keeps no tokens.
    """
    from rich.progress import track

    from penstock.pages.measuring import Setting, in_a_process, medians

    settings = [
        Setting(
            dataset=dataset,
            tokenizer=tokenizer,
            n_pages=pages,
            rows_per_page=rows,
            seed=seed,
            requests=number,
            batch_size=batch,
            sequence_length=length,
            buffer_mb=size,
        )
        for number, batch, length, size in product(
            _numbers(requests, "--requests"),
            _numbers(batch_size, "--batch-size"),
            _numbers(sequence_length, "--sequence-length"),
            _numbers(buffer_mb, "--buffer-mb"),
        )
    ]
    taken: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in settings}
    turns = [(turn, setting) for turn in range(rounds) for setting in settings]  # in turns: noise is noise for all
    screen = console(stderr=True)
    shown = track(turns, "measuring", console=screen, transient=True, disable=as_json or not screen.is_terminal)
    for place, (_, setting) in enumerate(shown):
        taken[setting].append(in_a_process(setting._replace(offset=place * pages)))
    found = [{**setting.told(), **medians(figures)} for setting, figures in taken.items()]
    if csv_file is not None:
        _write_csv(csv_file, found)
    if plot is not None:
        _draw(plot, dataset or "the environment's bucket", found)
    if as_json:
        print_json({"dataset": dataset, "settings": found})
    else:
        _print_table(found)


def _write_csv(path: Path, found: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    print(path, file=sys.stderr)


def _draw(path: Path, dataset: str, found: Sequence[dict[str, Any]]) -> None:
    from penstock.observe.bars import Bar, draw_bars

    bars = [
        Bar(
            f"{told['requests']} requests, batch {told['batch_size']} x {told['sequence_length']}, "
            f"{told['buffer_mb']} MB",
            told["tokens_per_s"],
            f"{told['mb_per_s']:,.0f} MB/s, {told['peak_memory_mb']:,.0f} MB of memory",
        )
        for told in found
    ]
    path.write_text(draw_bars(f"Pages of {dataset}", "tokens a second, loading included", bars), encoding="utf-8")
    print(path, file=sys.stderr)


def _print_table(found: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for name in found[0]:
        table.add_column(name, justify="right")
    for told in sorted(found, key=lambda told: -told["tokens_per_s"]):
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in told.values()))
    console().print(table)

"""`penstock pages`: index, inspect, choose and verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import CHECK_FAILED, console, counted, human_bytes, print_facts, print_json

pages = typer.Typer(help="Parquet data sets in buckets, read page by page.", no_args_is_help=True)

_DATASET_HELP = "A folder, s3://bucket/prefix or https://server/folder; else the environment's data set bucket."
Dataset = Annotated[str | None, typer.Argument(help=_DATASET_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@pages.command()
def index(
    dataset: Dataset = None,
    text_column: Annotated[str | None, typer.Option(help="The column with the texts; else found by name.")] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Shards looked at together.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Write _shard_sizes.json and _metadata.yaml: how many rows each Parquet file has, by its footer."""
    from rich.progress import Progress

    from penstock.pages import R2DatasetLoader, make_index, write_index
    from penstock.pages.places import write_storages

    stores = write_storages(dataset, subfolder=R2DatasetLoader.DATASET_SUBFOLDER, region=R2DatasetLoader.CF_REGION_NAME)
    screen = console(stderr=True)
    with Progress(console=screen, transient=True, disable=as_json or not screen.is_terminal) as bar:
        task = bar.add_task("looking at shards", total=None)
        sizes, catalog = make_index(
            stores[0],
            text_column=text_column,
            max_requests=max_requests,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    written = write_index(stores, sizes)
    told = {"dataset": stores[0].url, "written": written, **catalog.as_dict()}
    if as_json:
        print_json(told)
        return
    _print_catalog(told)
    console().print("index written" if written else "the index was like this already: nothing written")


@pages.command()
def inspect(dataset: Dataset = None, as_json: AsJson = False) -> None:
    """Show what a data set holds, by its index."""
    opened = _opened(dataset)
    told = {"dataset": opened.where, **opened.catalog().as_dict()}
    if as_json:
        print_json(told)
    else:
        _print_catalog(told)


@pages.command()
def choose(
    dataset: Dataset = None,
    seed: Annotated[str, typer.Option(help="A number or a text.")] = "0",
    offset: Annotated[int, typer.Option(help="Position of the first page in the seed's order.")] = 0,
    n_pages: Annotated[int, typer.Option(help="Pages of the window.")] = 1,
    rows_per_page: Annotated[int, typer.Option(help="Rows of a page.")] = 100,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "train",
    as_json: AsJson = False,
) -> None:
    """Say which pages a seed has to read in a window, and their digest."""
    from penstock.pages import verify_window

    verdict = verify_window(_opened(dataset).catalog(), _window(seed, offset, n_pages, rows_per_page, split))
    if as_json:
        print_json(verdict.as_dict())
        return
    for page in verdict.pages:
        console().print(f"{page.config_name}  rows {page.first_row} to {page.first_row + page.row_count}  {page.split}")
    console().print(f"digest {verdict.digest}")


@pages.command()
def verify(
    dataset: Dataset = None,
    report: Annotated[
        Path | None, typer.Option(help="What R2DatasetLoader.report() gave, as JSON; - for standard input.")
    ] = None,
    digest: Annotated[str | None, typer.Option(help="The digest alone, with the window by the options below.")] = None,
    seed: Annotated[str | None, typer.Option(help="A number or a text; else the report's.")] = None,
    offset: Annotated[int | None, typer.Option(help="Position of the first page; else the report's.")] = None,
    n_pages: Annotated[int | None, typer.Option(help="Pages of the window; else the report's.")] = None,
    rows_per_page: Annotated[int | None, typer.Option(help="Rows of a page; else the report's, or 100.")] = None,
    split: Annotated[str | None, typer.Option(help="train, valid or test; else the report's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Work out what (seed, window) had to read, and compare it with what was read. Exit code 3 where it differs."""
    from penstock.errors import ConfigError
    from penstock.pages import verify_window
    from penstock.pages.verify import window_of

    if (report is None) == (digest is None):
        raise ConfigError("give --report, or --digest with --seed, --offset and --n-pages: what is to be verified?")
    told: Any = digest
    if report is not None:
        told = _read_report(report)
        window = window_of(
            told, seed=seed, offset=offset, n_pages=n_pages, num_rows_per_page=rows_per_page, split=split
        )
    elif seed is None or offset is None or n_pages is None:
        raise ConfigError("--digest says nothing of the window: give --seed, --offset and --n-pages with it")
    else:
        window = _window(
            seed,
            offset,
            n_pages,
            100 if rows_per_page is None else rows_per_page,
            "train" if split is None else split,
        )
    verdict = verify_window(_opened(dataset).catalog(), window, told)
    if as_json:
        print_json(verdict.as_dict())
    elif verdict.problems:
        for problem in verdict.problems:
            console(stderr=True).print(problem, style="red")
    else:
        rows = sum(page.row_count for page in verdict.pages)
        console().print(
            f"holds: {counted(len(verdict.pages), 'page')}, {counted(rows, 'sample')}, digest {verdict.digest}"
        )
    if verdict.problems:
        raise typer.Exit(CHECK_FAILED)


def _opened(dataset: str | None) -> Any:
    from penstock.pages import R2DatasetLoader
    from penstock.pages.places import open_dataset

    return open_dataset(dataset, subfolder=R2DatasetLoader.DATASET_SUBFOLDER, region=R2DatasetLoader.CF_REGION_NAME)


def _window(seed: str, offset: int, n_pages: int, rows_per_page: int, split: str) -> Any:
    from penstock.pages.catalog import split_name
    from penstock.pages.choice import Window, seed_text

    return Window(
        seed=seed_text(seed),
        offset=offset,
        n_pages=n_pages,
        split=split_name(split),
        num_rows_per_page=rows_per_page,
    )


def _read_report(path: Path) -> dict[str, Any]:
    import orjson

    from penstock.errors import ConfigError

    try:
        found = orjson.loads(sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path}: the report cannot be read: {error}: expected JSON") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a report, as R2DatasetLoader.report() gives it")
    return found


def _print_catalog(told: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for name in ("config", "split", "shards", "rows", "size"):
        table.add_column(name, justify="left" if name in ("config", "split") else "right", overflow="fold")
    for config in told["configs"]:
        size = human_bytes(config["size_bytes"]) if config["size_bytes"] else ""
        table.add_row(config["config"], config["split"], f"{config['shards']:,}", f"{config['rows']:,}", size)
    console().print(table)
    print_facts(told["dataset"], {"rows": f"{told['rows']:,}", "data set id": told["dataset_id"]})

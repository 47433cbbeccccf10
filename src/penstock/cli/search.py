"""`penstock search`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import console, print_json

if TYPE_CHECKING:
    from penstock.sources.search import FoundDataset


class Kind(StrEnum):
    text = "text"
    audio = "audio"
    image = "image"
    video = "video"
    tabular = "tabular"
    document = "document"
    geospatial = "geospatial"
    timeseries = "timeseries"
    three_d = "3d"


def search(
    query: Annotated[str, typer.Argument(help="Words in a data set's name; nothing finds all.")] = "",
    modality: Annotated[Kind | None, typer.Option(help="Only data sets of this kind.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to show.")] = 20,
    support: Annotated[bool, typer.Option("--support", help="Show which kinds can be trained on, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Search the Hub for data sets, and say which of them can be trained on."""
    from dataclasses import asdict

    from penstock.sources.modalities import MODALITIES

    if support:
        _print_support(as_json=as_json)
        return
    from penstock.sources.search import search_datasets

    kind = MODALITIES[modality.value] if modality else None
    found = search_datasets(query, kind, limit=limit)
    if as_json:
        print_json([asdict(dataset) for dataset in found])
        return
    _print_found(found, query)
    if kind is not None and not kind.can_train:
        console(stderr=True).print(f"note: {kind.reason}")


def _print_found(found: list[FoundDataset], query: str) -> None:
    from rich.table import Table
    from rich.text import Text

    if not found:
        console().print(f"nothing on the Hub matches {query!r}")
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("data set", "kind", "training", "downloads", "likes"):
        table.add_column(name, justify="right" if name in ("downloads", "likes") else "left", no_wrap=True)
    for dataset in found:
        training = {True: "yes", False: "no", None: "unknown"}[dataset.can_train]
        name = dataset.spec + (" (gated)" if dataset.gated else "")
        kinds = ", ".join(dataset.modalities) or "untagged"
        table.add_row(Text(name), Text(kinds), training, f"{dataset.downloads:,}", f"{dataset.likes:,}")
    console().print(table)


def _print_support(*, as_json: bool) -> None:
    from rich.table import Table

    from penstock.sources.modalities import MODALITIES

    if as_json:
        print_json(
            [
                {"modality": kind.name, "tag": kind.tag, "support": kind.support, "reason": kind.reason}
                for kind in MODALITIES.values()
            ]
        )
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("modality", "tag on the Hub", "training", ""):
        table.add_column(name, no_wrap=True)
    for kind in MODALITIES.values():
        table.add_row(kind.title, kind.tag, kind.support, kind.reason)
    console().print(table)

"""The `penstock` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import data, demo, run, train
from penstock.errors import PenstockError

app = typer.Typer(
    help="Feeds training data to any number of GPUs: every sample exactly once per epoch, through any crash.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(data.ingest)
app.command()(data.inspect)
app.command()(train.train)
app.command()(run.status)
app.command()(run.audit)
app.command()(run.picture)
app.command()(demo.demo)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"penstock {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command; an error is one sentence on stderr and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        app()
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

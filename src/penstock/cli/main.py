"""The `penstock` command."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import bench_storage, bench_train, data, demo, exchange, feed, pages, run, search, steering, train
from penstock.errors import PenstockError

app = typer.Typer(
    help="Feeds training data to any number of GPUs: every sample exactly once per epoch, through any crash.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(data.ingest)
app.command()(data.inspect)
app.command()(search.search)
app.command()(feed.tokenize)
feed.bench.command()(bench_storage.storage)
feed.bench.command()(bench_train.train)
app.add_typer(feed.bench, name="bench")
app.add_typer(pages.pages, name="pages")
app.add_typer(exchange.exchange, name="exchange")
app.command()(train.train)
app.command()(steering.stop)
app.command()(steering.join)
app.command()(train.export)
app.command()(run.status)
app.command()(run.audit)
app.command()(run.skip)
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
    # typer would take Ctrl-C for its own and say nothing; with this it comes out as what it is.
    signal.signal(signal.SIGINT, _interrupted)
    try:
        app()
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has gone
        sys.exit(1)


class _Interrupted(PenstockError):
    """Ctrl-C before or outside of a training."""


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise _Interrupted("interrupted: run the same command again to go on; what was finished is kept")


if __name__ == "__main__":
    main()

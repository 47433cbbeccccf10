"""`penstock stop` and `penstock join`: a word to a training that is under way, left as a file in its folder."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.output import console
from penstock.cli.run import RunArgument


def stop(run: RunArgument) -> None:
    """Ask a training to finish its step, commit and end; it is taken up again by `penstock train`."""
    from penstock.observe.run_folder import RunFolder
    from penstock.train.stopping import STOP_FILE

    folder = RunFolder(run)
    folder.require_training()
    folder.leave_word(STOP_FILE, "")
    console().print(f"{run} was asked to stop: it commits first, and says so")


def join(
    run: RunArgument,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="How many more.")] = 1,
) -> None:
    """Have more workers join a training with --parallel-independent; they begin with the state of its last commit."""
    from penstock.errors import ConfigError
    from penstock.observe.run_folder import RunFolder
    from penstock.train.joining import JOIN_FILE

    folder = RunFolder(run)
    folder.require_training()
    if not folder.settings.get("parallel_independent"):
        raise ConfigError(
            f"{run} has no independent workers that others could join: it was not started with "
            "--parallel-independent; stop it, and start it again with more"
        )
    folder.leave_word(JOIN_FILE, str(workers))
    console().print(f"{workers} more will join {run} as soon as they have started")

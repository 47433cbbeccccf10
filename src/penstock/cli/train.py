"""`penstock train` and `penstock export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.data import ingest_bar
from penstock.cli.output import console, counted, print_json
from penstock.cli.train_flags import NUMBER_OR_WORD, with_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.blocks import IngestProgress
    from penstock.train.config import TrainingConfig


@with_flags
def train(
    *,
    file: Annotated[str, typer.Argument(help="A TOML file with settings.")] = "",
    config: Annotated[str, typer.Option(help="The same, as an option.")] = "",
    run: Annotated[
        str,
        typer.Option(
            "--run",
            "--run-dir",
            help="The run's folder; resumes the run it holds, with its settings. Default: runs/NAME.",
        ),
    ] = "",
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and no progress.")] = False,
    flags: dict[str, Any],
) -> None:
    """Train on a data set, or resume a run from its last commit.

    `penstock train --run RUN` alone resumes with the settings the run has. What a file says goes before those, what
    --set says before the file, and flags before all.
    """
    from dataclasses import asdict

    from penstock.cli.progress import TrainingProgress
    from penstock.errors import ConfigError

    if file and config:
        raise ConfigError(f"{file} and --config {config}: expected one file with settings")
    from penstock.feed.world import launched_world
    from penstock.train.settings import run_exists

    run_training = load_run_training()
    rank = launched_world()
    quiet = as_json or (rank is not None and rank[0] > 0)  # rank 0 speaks for all
    with ingest_bar(quiet=quiet) as on_progress:
        settled = _gather(file or config, run, assignments or [], flags, on_progress, launched=rank is not None)
    if not quiet and not run_exists(settled.run_dir):
        console(stderr=True).print("preparing: reading the data set and, where none is named, training a tokenizer")
    with TrainingProgress(quiet=quiet) as progress:
        result = run_training(settled, [progress])
    if rank is not None and rank[0] > 0:
        return
    if as_json:
        print_json(asdict(result))
        return
    console().print(
        f"stopped: {REASONS[result.reason]}; {counted(result.total_steps, 'step')} in all, "
        f"last commit {result.checkpoint_id} in {result.run_dir}"
    )


def _gather(
    file: str,
    run: str,
    assignments: list[str],
    flags: dict[str, Any],
    on_progress: Callable[[IngestProgress], None] | None,
    *,
    launched: bool,
) -> TrainingConfig:
    """All settings there are, with the data set's blocks made; a run that is there lends what nobody says.

    Ranks of a launcher leave the blocks to rank 0, and wait for it.
    """
    from penstock.blocks import BlockManager
    from penstock.errors import ConfigError
    from penstock.train.data import make_blocks
    from penstock.train.settings import gather, settings_of_file, settings_of_run, settings_of_words

    numbers = [f"{name}={flags[name]}" for name in NUMBER_OR_WORD if name in flags]
    flags = {**flags, **settings_of_words(numbers)}
    said = (settings_of_file(file) if file else {}) | settings_of_words(assignments) | flags
    if run:
        said["run_dir"] = run
    folder = said.get("run_dir", "")
    found = settings_of_run(folder) if folder else None
    if found is None and folder and not said.get("dataset_file"):
        raise ConfigError(f"{folder} {_no_run(Path(folder))}")
    config = gather(found, said)
    config.check()
    if launched:
        if not folder:
            raise ConfigError("ranks of a launcher have to be told the run's folder: name it with --run-dir")
        return config
    make_blocks(config, said, on_progress)
    if not folder:
        folder = str(Path("runs", BlockManager(config.dataset_file).manifest.header.dataset_name))
        found = settings_of_run(folder)
        names = ("dataset_file", "dataset_source", "eval_file", "eval_source")
        made = {name: getattr(config, name) for name in names if getattr(config, name)}
        config = gather(found, {**said, **made, "run_dir": folder})
    return config


def _no_run(folder: Path) -> str:
    """Why a folder cannot be resumed, and what to do."""
    left = [name for name in ("ledger.sqlite", "checkpoints") if (folder / name).exists()]
    if left:
        return f"has lost its config.toml, though it has {' and '.join(left)}: restore it from a copy"
    return "holds no run to resume: name the folder of one, or a data set to begin one there (--dataset-file)"


def export(
    run: Annotated[str, typer.Argument(help="The run's folder.")],
    dest: Annotated[str, typer.Argument(help="The folder to write; made if it is not there.")],
    checkpoint: Annotated[str, typer.Option(help="Which checkpoint, by its steps; else the last commit's.")] = "",
) -> None:
    """Write a run's model as a folder that transformers' `from_pretrained` reads."""
    load_run_training()
    from penstock.train.exporting import export_run

    exported = export_run(run, dest, checkpoint)
    console().print(f"checkpoint {exported} of {run} is in {dest}: config.json, model.safetensors, tokenizer.json")


REASONS = {
    "steps": "the steps asked for are done (more with --steps)",
    "epoch": "the epoch is complete (the next with --iterate --no-stop-after-epoch)",
    "signal": "asked to stop; committed first",
    "file": "asked to stop by penstock stop; committed first",
}


def load_run_training():
    """`run_training`, or the pip command that brings what it needs."""
    from penstock import run_training

    return run_training

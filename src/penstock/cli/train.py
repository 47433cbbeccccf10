"""`penstock train`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.data import ingest_bar
from penstock.cli.output import TOKENIZER_HELP, console, print_json


def train(
    dataset_file: Annotated[
        str, typer.Option(help="A block store, a file, a folder, a glob, hf://name[:config[:split]] or s3://...")
    ],
    run: Annotated[
        str, typer.Option("--run", "--run-dir", help="The run's folder; resumes the run it holds. Default: runs/NAME.")
    ] = "",
    model: Annotated[str, typer.Option(help="tiny, small or counting.")] = "tiny",
    tokenizer: Annotated[str, typer.Option(help=f"{TOKENIZER_HELP} Without, one is trained on the data.")] = "",
    vocab_size: Annotated[int, typer.Option(help="Entries of a tokenizer trained here.")] = 4096,
    dataset_chunk_size: Annotated[int, typer.Option(help="Samples a chunk.")] = 4_000,
    batch_size: Annotated[int, typer.Option(help="Sequences a step (of each worker).")] = 8,
    max_seq_len: Annotated[int, typer.Option(help="Tokens a sequence.")] = 256,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="Parts a batch is computed in.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Step size of the optimizer.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Stop at this many steps of the run in all.")] = None,
    stop_after_epoch: Annotated[bool, typer.Option("--stop-after-epoch", help="Stop at the epoch's end.")] = False,
    iterate: Annotated[bool, typer.Option("--iterate", help="Go on into the next epoch.")] = False,
    parallel_independent: Annotated[
        bool, typer.Option("--parallel-independent", help="Several workers, merged at every commit.")
    ] = False,
    ddp: Annotated[
        bool,
        typer.Option("--ddp", help="Ranks that learn every batch together: under torchrun, else --workers of them."),
    ] = False,
    workers: Annotated[int, typer.Option(help="How many, with --parallel-independent or --ddp.")] = 1,
    plan: Annotated[str, typer.Option(help="claims or strided. Default: strided with --ddp, else claims.")] = "",
    respawn: Annotated[int, typer.Option(help="How often workers that died are started again, in all.")] = 0,
    outer_learning_rate: Annotated[float, typer.Option(help="How much of the workers' mean change is taken.")] = 1.0,
    outer_momentum: Annotated[float, typer.Option(help="Nesterov momentum of that; 0 for none.")] = 0.0,
    stall_timeout_s: Annotated[
        float, typer.Option(help="How long one step may take before a worker is killed.")
    ] = 3600.0,
    rank_timeout_s: Annotated[float, typer.Option(help="How long ranks wait for one another.")] = 600.0,
    merge: Annotated[str, typer.Option(help="mean, or sum of what each worker changed.")] = "mean",
    commit_every_chunks: Annotated[int, typer.Option(help="Chunks between commits.")] = 8,
    commit_every_s: Annotated[float, typer.Option(help="Seconds between commits at most.")] = 300.0,
    keep_checkpoints: Annotated[int, typer.Option(help="Checkpoints that stay on disk.")] = 3,
    session_timeout_s: Annotated[float, typer.Option(help="How long a silent worker keeps its chunks.")] = 60.0,
    ledger: Annotated[
        str, typer.Option(help="postgresql://host/database?run=NAME; else ledger.sqlite in the run.")
    ] = "",
    log_file: Annotated[str, typer.Option(help="Where metrics go; else metrics.jsonl in the run.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and no progress.")] = False,
) -> None:
    """Train on a data set, or resume a run from its last commit."""
    from dataclasses import asdict

    from penstock.blocks import prepare_blocks
    from penstock.cli.progress import TrainingProgress
    from penstock.feed.world import launched_world
    from penstock.train.config import TrainingConfig

    run_training = load_run_training()
    config = TrainingConfig(
        dataset_file=dataset_file,
        run_dir=run,
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        dataset_chunk_size=dataset_chunk_size,
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=learning_rate,
        seed=seed,
        steps=steps,
        stop_after_epoch=stop_after_epoch,
        iterate=iterate,
        parallel_independent=parallel_independent,
        workers=workers,
        ddp=ddp,
        plan=plan,  # pyright: ignore[reportArgumentType] - checked with the other settings, with a sentence
        respawn=respawn,
        outer_learning_rate=outer_learning_rate,
        outer_momentum=outer_momentum,
        stall_timeout_s=stall_timeout_s,
        rank_timeout_s=rank_timeout_s,
        merge=merge,  # pyright: ignore[reportArgumentType] - checked with the other settings, with a sentence
        commit_every_chunks=commit_every_chunks,
        commit_every_s=commit_every_s,
        keep_checkpoints=keep_checkpoints,
        session_timeout_s=session_timeout_s,
        ledger=ledger,
        log_file=log_file,
    )
    config.check()
    rank = launched_world()
    if rank is None:
        with ingest_bar(quiet=as_json) as on_progress:
            config.dataset_file = prepare_blocks(dataset_file, config.samples_per_block, on_progress=on_progress)
    quiet = as_json or (rank is not None and rank[0] > 0)  # rank 0 speaks for all
    if not quiet:
        console(stderr=True).print("preparing: reading the data set and, for a new run, training its tokenizer")
    with TrainingProgress(quiet=quiet) as progress:
        result = run_training(config, [progress])
    if rank is not None and rank[0] > 0:
        return
    if as_json:
        print_json(asdict(result))
        return
    console().print(
        f"stopped: {REASONS[result.reason]}; {result.total_steps} steps in all, last commit {result.checkpoint_id} "
        f"in {result.run_dir}"
    )


REASONS = {
    "steps": "the steps asked for are done",
    "epoch": "the epoch is complete",
    "signal": "asked to stop; committed first",
    "file": "asked to stop by penstock stop; committed first",
}


def load_run_training():
    """`run_training`, or the pip command that brings what it needs."""
    from penstock import run_training

    return run_training

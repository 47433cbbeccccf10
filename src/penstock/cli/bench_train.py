"""`penstock bench train`: the same training over more and more devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import TOKENIZER_HELP, console, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.train.comparing import Measured


def train(
    model: Annotated[str, typer.Option(help="A folder, a config.json, or owner/name of the Hub.")],
    dataset_file: Annotated[str, typer.Option(help="What to train on; else made-up texts.")] = "",
    tokenizer: Annotated[str, typer.Option(help=f"{TOKENIZER_HELP} Else the model's own, or one is trained.")] = "",
    devices: Annotated[str, typer.Option("--devices", "--cuda-ids", help="CUDA devices, as in 0,1,2,3.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Without --devices: up to so many ranks.")] = 1,
    worlds: Annotated[str, typer.Option(help="Numbers of ranks to compare, as in 1,3; else 1, 2, 4, ... all.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N, for --workers.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Of each training; the first two are not timed.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step, of all ranks together.")] = 8,
    max_seq_len: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="Parts a batch is computed in.")] = 1,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    learning_rate: Annotated[float, typer.Option(help="Step size.")] = 1e-4,
    streamed: Annotated[bool, typer.Option("--streamed/--no-streamed", help="Weights on the host, or not.")] = True,
    gpu_budget_gib: Annotated[float | None, typer.Option(help="GPU memory to use, streamed; else nearly all.")] = None,
    offload_activations: Annotated[bool, typer.Option(help="States between layers on the host too.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where runs are meanwhile; else with temporary files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train the same batches on 1, 2, 4, ... devices, and compare speed and loss.

    The batch stays what it is and is shared by more and more ranks; every training begins anew with fresh weights.
    """
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    from penstock.cli.train import load_run_training

    load_run_training()
    from penstock.train.comparing import compare, largest_difference, make_up_data, vocabulary_for
    from penstock.train.config import TrainingConfig

    config = TrainingConfig(
        model=model,
        dataset_file=dataset_file or "made up",
        tokenizer=tokenizer,
        cuda_ids=devices,
        device=device,
        steps=steps,
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        gradient_accumulation_steps=gradient_accumulation_steps,
        precision=precision,  # pyright: ignore[reportArgumentType] - checked
        learning_rate=learning_rate,
        fresh_weights=True,
        ddp=True,
        streamed=streamed,
        gpu_budget_gib=gpu_budget_gib,
        offload_activations=offload_activations,
    )
    config.check()
    sizes = _worlds(worlds, len(config.cuda_indices) or workers, devices)
    screen = console(stderr=True)
    found: list[Measured] = []
    with TemporaryDirectory(prefix="penstock-bench-", dir=folder) as there:
        if not dataset_file:
            config.dataset_file = str(make_up_data(Path(there), steps * batch_size * max_seq_len))
            config.vocab_size = vocabulary_for(config)
        for measured in compare(config, sizes, Path(there)):
            found.append(measured)
            if not as_json:
                screen.print(f"ranks: {measured.world}: {measured.tokens_per_s:,.0f} tokens/s")
    if as_json:
        told = [{**asdict(each), "speed_up": each.tokens_per_s / found[0].tokens_per_s} for each in found]
        print_json({"model": model, "runs": told, "largest_loss_difference": largest_difference(found)})
    else:
        print_tables(found)


def _worlds(words: str, most: int, devices: str) -> list[int]:
    from penstock.errors import ConfigError
    from penstock.train.comparing import sizes_up_to

    if not words:
        return sizes_up_to(most)
    try:
        sizes = sorted({int(word) for word in words.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise ConfigError(f"--worlds {words} is no list of numbers: expected some, as in 1,2")
    if devices and sizes[-1] > most:
        raise ConfigError(f"--worlds {words} asks for {sizes[-1]} ranks of {most} devices: name more with --devices")
    return sizes


def print_tables(found: Sequence[Measured]) -> None:
    """Speed by ranks, then losses side by side."""
    from rich.table import Table

    from penstock.train.comparing import largest_difference

    speed = Table(box=None, padding=(0, 2))
    for name in ("ranks", "step", "tokens/s", "speed-up", "MFU"):
        speed.add_column(name, justify="right")
    for each in found:
        mfu = "" if each.mfu is None else f"{100 * each.mfu:.1f} %"
        faster = each.tokens_per_s / found[0].tokens_per_s
        speed.add_row(str(each.world), f"{each.step_s:.4g} s", f"{each.tokens_per_s:,.0f}", f"{faster:.2f}", mfu)
    losses = Table(box=None, padding=(0, 2))
    losses.add_column("step", justify="right")
    for each in found:
        losses.add_column(f"loss, {each.world}", justify="right")
    for number, row in enumerate(zip(*(each.losses for each in found), strict=True), 1):
        losses.add_row(str(number), *(_loss(loss) for loss in row))
    console().print(speed)
    console().print(losses)
    console().print(f"largest difference of losses: {largest_difference(found):.2e} of the loss")


def _loss(loss: Any) -> str:
    return "none" if loss is None else f"{loss:.6f}"

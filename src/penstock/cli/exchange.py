"""`penstock exchange`: the three roles, who takes part, where a run stands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import console, counted, human_bytes, print_facts, print_json

if TYPE_CHECKING:
    from penstock.exchange.places import Places
    from penstock.exchange.status import RunStatus

exchange = typer.Typer(help="Training across the internet through buckets.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="The run's name.")]
Buckets = Annotated[
    str | None,
    typer.Option(help="A folder instead of the environment's buckets: for trying things out on one machine."),
]
Work = Annotated[Path | None, typer.Option(help="A folder of this worker's own: metrics.jsonl.")]
Poll = Annotated[float, typer.Option(min=0.01, help="Seconds between looks at the store.")]
Patience = Annotated[float, typer.Option(min=0, help="Seconds that a store may be gone before that is an error.")]
Until = Annotated[int | None, typer.Option(min=1, help="Stop once so many windows are closed; else run on.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads to compute with; 0: as many as torch likes.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_PATIENCE_S = 3_600.0


@exchange.command()
def aggregator(
    run: Annotated[str, typer.Argument(help="The run's name; with --config, of the run to begin.")],
    config: Annotated[
        Path | None, typer.Option(help="TOML with the settings of a run to begin, or to go on with.")
    ] = None,
    buckets: Buckets = None,
    work: Work = None,
    poll_s: Poll = 1.0,
    patience_s: Patience = _PATIENCE_S,
    gather_bytes: Annotated[int, typer.Option(min=1, help="Memory for contributions while they are gathered.")] = 256
    << 20,
    until_window: Until = None,
    threads: Threads = 0,
) -> None:
    """Gather contributions, reject what is no good, publish windows and checkpoints. Begins the run with --config."""
    places = _opened("aggregator", buckets, patience_s)
    _compute_with(threads)
    from penstock.errors import ConfigError
    from penstock.exchange.aggregator import Aggregator
    from penstock.exchange.opening import begin_run, open_run, read_settings

    if config is None:
        opened = open_run(places, run)
    else:
        settings = read_settings(config)
        if settings.run != run:
            raise ConfigError(f"{config} has settings of run {settings.run!r}: expected {run!r}")
        opened = begin_run(places, settings)
    _until_stopped(
        lambda stop: Aggregator(
            opened, stop=stop, work=work, poll_s=poll_s, gather_bytes=gather_bytes, until_window=until_window
        ).run()
    )


@exchange.command()
def miner(
    run: Run,
    uid: Annotated[str, typer.Option(help="Who this is, as the run's owner admitted it.")],
    work: Annotated[Path, typer.Option(help="A folder of this miner's own: what it has not sent yet, metrics.jsonl.")],
    buckets: Buckets = None,
    device: Device = "cpu",
    poll_s: Poll = 1.0,
    patience_s: Patience = _PATIENCE_S,
    until_window: Until = None,
    threads: Threads = 0,
) -> None:
    """Learn the pages of each window, send what that came to, and take the windows' outer steps."""
    places = _opened("miner", buckets, patience_s)
    _compute_with(threads)
    from penstock.exchange.miner import Miner
    from penstock.exchange.opening import open_run

    opened = open_run(places, run)
    _until_stopped(
        lambda stop: Miner(opened, uid, work, stop=stop, device=device, poll_s=poll_s, until_window=until_window).run()
    )


@exchange.command()
def validator(
    run: Run,
    buckets: Buckets = None,
    work: Work = None,
    device: Device = "cpu",
    poll_s: Poll = 1.0,
    patience_s: Patience = _PATIENCE_S,
    until_window: Until = None,
    threads: Threads = 0,
) -> None:
    """Measure what each contribution does to the loss, and post scores and the peer list."""
    places = _opened("validator", buckets, patience_s)
    _compute_with(threads)
    from penstock.exchange.opening import open_run
    from penstock.exchange.validator import Validator

    opened = open_run(places, run)
    _until_stopped(
        lambda stop: Validator(
            opened, stop=stop, work=work, device=device, poll_s=poll_s, until_window=until_window
        ).run()
    )


@exchange.command()
def admit(
    run: Run,
    uids: Annotated[list[str], typer.Argument(help="Who may contribute from the next window on.")],
    remove: Annotated[bool, typer.Option("--remove", help="Who may do so no longer.")] = False,
    buckets: Buckets = None,
) -> None:
    """Add miners to a run, or remove them; needs the aggregator's credentials."""
    from penstock.exchange.keys import Keys
    from penstock.exchange.members import admit as change
    from penstock.exchange.members import read_members

    places = _opened("aggregator", buckets, 60.0)
    before = read_members(places.aggregator, Keys(run))
    members = change(places.aggregator, Keys(run), uids, remove=remove)
    vain = [uid for uid in dict.fromkeys(uids) if (uid in before) != remove]
    console().print(f"{run}: {_in_vain(vain, remove)}{counted(len(members), 'member')}: {', '.join(members)}")


def _in_vain(uids: list[str], remove: bool) -> str:
    """For whom there was nothing to do."""
    if not uids:
        return ""
    if len(uids) == 1:
        return f"{uids[0]} was {'no member' if remove else 'a member already'}: "
    return f"{', '.join(uids)} were {'no members' if remove else 'members already'}: "


@exchange.command()
def status(
    run: Run,
    buckets: Buckets = None,
    last: Annotated[int, typer.Option(min=1, help="How many windows to look at.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show windows, contributors, rejections with their reasons, bytes and scores."""
    found = _status(run, buckets, last)
    if as_json:
        print_json(found.as_dict())
    else:
        _print_status(found.as_dict())


@exchange.command()
def export(
    run: Run,
    to: Annotated[str, typer.Argument(help="Folder to write to.")],
    buckets: Buckets = None,
    patience_s: Patience = 60.0,
) -> None:
    """Write the model, as far as windows are closed, for transformers' from_pretrained."""
    places = _opened("export", buckets, patience_s)
    _compute_with(0)
    from penstock.exchange.exporting import export_model
    from penstock.exchange.opening import open_run

    learned = export_model(open_run(places, run), to)
    console().print(f"{to}: the model after {counted(learned, 'window')}")


@exchange.command()
def picture(
    run: Run,
    to: Annotated[Path, typer.Option(help="Where to draw.")] = Path("exchange.svg"),
    buckets: Buckets = None,
    last: Annotated[int, typer.Option(min=1, help="How many windows to draw.")] = 100,
) -> None:
    """Draw who contributed to which window."""
    from penstock.exchange.picture import draw_exchange

    console().print(str(draw_exchange(_status(run, buckets, last), to)))


def _status(run: str, buckets: str | None, last: int) -> RunStatus:
    from penstock.exchange.status import read_status

    return read_status(_opened("status", buckets, 60.0), run, last=last)


def _opened(role: Any, buckets: str | None, patience_s: float) -> Places:
    from penstock.exchange.places import open_places

    return open_places(role, buckets, patience_s=patience_s)


def _compute_with(threads: int) -> None:
    from penstock.errors import MissingExtraError

    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError("this needs torch: install it with `pip install 'torch>=2.11' safetensors`") from error
    if threads:
        torch.set_num_threads(threads)


def _until_stopped(role: Callable[[Any], int]) -> None:
    """Run a role until it is done or a signal asks it to stop."""
    from penstock.train.stopping import SignalsStop, StopRequest

    logging.getLogger("penstock.exchange.journal").setLevel(logging.INFO)  # a line a window, so that it can be followed
    stop = StopRequest()
    told = "stopping: nothing that was sent is lost, and the same command goes on; once more ends at once"
    with SignalsStop(stop, told=told):
        windows = role(stop)
    console(stderr=True).print(f"stopped after {counted(windows, 'window')}")


def _print_status(told: dict[str, Any]) -> None:
    from rich.table import Table

    sizes = told["bytes"]
    facts: dict[str, object] = {
        "windows closed": f"{told['windows_closed']:,}",
        "weights": f"{told['num_weights']:,}",
        "contributions": f"{human_bytes(sizes['contributions'])} for {human_bytes(sizes['dense'])} dense",
        "aggregates": human_bytes(sizes["aggregates"]),
        "rejections": ", ".join(f"{count} {reason}" for reason, count in told["rejections"].items()) or "none",
    }
    print_facts(f"{told['run']} at {told['where']}", facts)
    table = Table(box=None, padding=(0, 2))
    for name in ("miner", "standing", "score", "taken", "missing", "rejected", "flags"):
        table.add_column(name, justify="right" if name in ("score", "taken", "missing") else "left", overflow="fold")
    for each in told["members"]:
        rejected = ", ".join(f"{count} {reason}" for reason, count in each["rejected"].items())
        score = "" if each["score"] is None else f"{each['score']:.3f}"
        row = (each["uid"], each["standing"], score, str(each["contributions"]), str(each["missing"]), rejected)
        table.add_row(*row, ", ".join(each["flags"]))
    console().print(table)
    windows = Table(box=None, padding=(0, 2))
    for name in ("window", "taken", "missing", "rejected", "bytes", "seconds"):
        windows.add_column(name, justify="left" if name == "rejected" else "right", overflow="fold")
    for each in told["windows"]:
        rejected = "; ".join(f"{one['uid']} ({one['window']}) {one['reason']}" for one in each["rejected"])
        counts = (str(each["window"]), str(len(each["contributors"])), str(len(each["missing"])), rejected)
        windows.add_row(*counts, human_bytes(each["bytes"]), f"{each['seconds']:.1f}")
    console().print(windows)

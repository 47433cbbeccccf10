"""`penstock status`, `penstock audit` and `penstock picture`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import CHECK_FAILED, console, print_facts, print_json

if TYPE_CHECKING:
    from penstock.ledger import EpochAudit

RunArgument = Annotated[str, typer.Argument(help="The run's folder.")]
DatasetOption = Annotated[str | None, typer.Option(help="Where its data set is now, if it was moved.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show where a run stands. Does not disturb it."""
    from dataclasses import asdict

    from penstock.observe.run_folder import RunFolder

    folder = RunFolder(run)
    found = folder.ledger.status()
    total = folder.dataset["total_samples"]
    if as_json:
        print_json({**asdict(found), "dataset": folder.dataset, "total_samples": total})
        return
    last = found.last_commit
    print_facts(
        f"{folder.dataset['name']} in {run}",
        {
            "epoch": found.epoch,
            "committed": f"{found.samples_committed:,} of {total:,} samples of this epoch "
            f"({100 * found.samples_committed / max(1, total):.1f} %)",
            "chunks": ", ".join(f"{count} {phase}" for phase, count in found.chunks.items() if count) or "none claimed",
            "steps": f"{found.total_steps:,}",
            "last commit": last.checkpoint_id if last else "none",
            "generation": found.generation,
            "model": folder.settings["model"],
        },
    )
    active = [worker for worker in found.workers if worker.state == "active"]
    for worker in active:
        console().print(f"  {worker.worker} (pid {worker.pid}): {worker.samples_committed:,} samples committed")
    if not active:
        console().print("  no worker is active")


def audit(run: RunArgument, dataset_file: DatasetOption = None, as_json: JsonOption = False) -> None:
    """Prove each epoch: samples learned once, missing, twice. Exit code 3 where one is broken."""
    from penstock.observe.proof import prove
    from penstock.observe.run_folder import RunFolder

    folder = RunFolder(run)
    audits = prove(folder, dataset_file)
    broken = [found for found in audits if found.twice or found.foreign or (found.missing and found is not audits[-1])]
    if as_json:
        names = {worker.session_id: worker.worker for worker in folder.ledger.status().workers}
        epochs = [_audit_as_dict(found, names) for found in audits]
        print_json({"holds": all(found.holds for found in audits), "broken": bool(broken), "epochs": epochs})
    else:
        print_audits(audits)
    if broken:
        raise typer.Exit(CHECK_FAILED)


def picture(
    run: RunArgument,
    dataset_file: DatasetOption = None,
    output: Annotated[Path | None, typer.Option(help="Where it goes; else picture.svg in the run.")] = None,
) -> None:
    """Draw the run: chunks by worker, and the loss."""
    from penstock.observe.picture import draw_run
    from penstock.observe.run_folder import RunFolder

    folder = RunFolder(run)
    print(draw_run(folder, output or folder.path / "picture.svg", dataset_file))


def _audit_as_dict(found: EpochAudit, names: dict[int, str]) -> dict[str, object]:
    """The audit's fields, samples by worker instead of by session."""
    from dataclasses import asdict

    fields = asdict(found)
    by_worker: dict[str, int] = {}
    for session, samples in fields.pop("by_session").items():
        by_worker[names[session]] = by_worker.get(names[session], 0) + samples
    return {**fields, "holds": found.holds, "by_worker": by_worker}


def print_audits(audits: list[EpochAudit]) -> None:
    """The proof as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), title="audit", title_justify="left")
    for name in ("epoch", "samples", "learned once", "missing", "twice", ""):
        table.add_column(name, justify="right")
    for found in audits:
        verdict = Text("holds", "green") if found.holds else Text("not finished", "yellow")
        if found.twice or found.foreign or (found.missing and found is not audits[-1]):
            verdict = Text("does not hold", "red")
        table.add_row(*map(str, (found.epoch, found.samples, found.once, found.missing, found.twice)), verdict)
    console().print(table)

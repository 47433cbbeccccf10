"""`penstock status`, `penstock audit`, `penstock skip` and `penstock picture`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import CHECK_FAILED, console, counted, print_facts, print_json
from penstock.ledger.exclusions import TO_THE_END
from penstock.types import ChunkRef

if TYPE_CHECKING:
    from penstock.ledger import EpochAudit, Exclusion, LedgerStatus
    from penstock.observe.run_folder import RunFolder

_WATCH_S = 1.0

RunArgument = Annotated[str, typer.Argument(help="The run's folder.")]
DatasetOption = Annotated[str | None, typer.Option(help="Where its data set is now, if it was moved.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(
    run: RunArgument,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again every second, until no worker is left or Ctrl-C.")
    ] = False,
) -> None:
    """Show where a run stands. Does not disturb it."""
    from penstock.observe.liveness import lives
    from penstock.observe.run_folder import RunFolder

    folder = RunFolder(run)
    quiet = 0
    while True:
        found = folder.ledger.status()
        quiet = 0 if not found.workers or any(not life.dead_because for life in lives(folder, found)) else quiet + 1
        if watch and not as_json and console().is_terminal:
            console().clear()
        _print_status(folder, found, run, as_json=as_json)
        if not watch or quiet > 1:  # not at the first: a worker that was fenced joins again
            return
        sys.stdout.flush()
        time.sleep(_WATCH_S)


def _print_status(folder: RunFolder, found: LedgerStatus, run: str, *, as_json: bool) -> None:
    from dataclasses import asdict

    from penstock.observe.liveness import lives

    total = folder.dataset["total_samples"]
    here = lives(folder, found)
    if as_json:
        told = {
            life.worker.session_id: {
                "dead_because": life.dead_because or None,
                "last_sign_s": round(life.last_sign_s, 1),
            }
            for life in here
        }
        workers = [{**asdict(worker), **told.get(worker.session_id, {})} for worker in found.workers]
        print_json({**asdict(found), "workers": workers, "dataset": folder.dataset, "total_samples": total})
        return
    last = found.last_commit
    print_facts(
        f"{folder.dataset['name']} in {run}",
        {
            "epoch": found.epoch,
            "committed": f"{found.samples_committed:,} of {counted(total, 'sample')} of this epoch "
            f"({100 * found.samples_committed / max(1, total):.1f} %)",
            "chunks": ", ".join(f"{count} {phase}" for phase, count in found.chunks.items() if count) or "none claimed",
            "steps": f"{found.total_steps:,}",
            "last commit": last.checkpoint_id if last else "none",
            "generation": found.generation,
            **({"skip ranges": found.exclusions} if found.exclusions else {}),
            "model": folder.settings["model"],
        },
    )
    for life in here:
        worker = life.worker
        sign = f"last sign of life {life.last_sign_s:.0f} s ago"
        told = f"dead ({life.dead_because}), {sign}" if life.dead_because else sign
        learned = f"{counted(worker.samples_committed, 'sample')} committed"
        console().print(f"  {worker.worker} (pid {worker.pid}): {learned}; {told}")
    if all(life.dead_because for life in here):
        again = f"; `penstock train --run {run}` goes on from the last commit" if here else ""
        console().print(f"  no worker is active{again}")


def audit(
    run: RunArgument,
    dataset_file: DatasetOption = None,
    as_json: JsonOption = False,
    step: Annotated[int | None, typer.Option(help="What this step saw, and which checkpoint holds it.")] = None,
    chunk: Annotated[str | None, typer.Option(help="BLOCK/CHUNK: who trained it, when, in which checkpoint.")] = None,
) -> None:
    """Prove each epoch: samples learned once, excluded, missing, twice. Exit code 3 where one is broken."""
    from penstock.observe.history import skipped_steps
    from penstock.observe.proof import prove
    from penstock.observe.run_folder import RunFolder

    folder = RunFolder(run)
    if step is not None or chunk is not None:
        _tell_history(folder, step, chunk, dataset_file, as_json=as_json)
        return
    audits = prove(folder, dataset_file)
    broken = [found for found in audits if found.twice or found.foreign or (found.missing and found is not audits[-1])]
    if as_json:
        from dataclasses import asdict

        names = {worker.session_id: worker.worker for worker in folder.ledger.status().workers}
        epochs = [_audit_as_dict(found, names) for found in audits]
        exclusions = [asdict(entry) for entry in folder.ledger.exclusions()]
        whole = {"holds": all(found.holds for found in audits), "broken": bool(broken), "epochs": epochs}
        skipped = [asdict(seen) for seen in skipped_steps(folder)]
        print_json({**whole, "exclusions": exclusions, "skipped_steps": skipped})
    else:
        print_audits(audits)
        for entry in folder.ledger.exclusions():
            console().print(f"  {_excluded(entry)}")
        for seen in skipped_steps(folder):
            console().print(
                f"  step {seen.step} taught nothing: its loss or its gradients were not numbers; "
                f"it saw samples {_ranges(seen.samples)}"
            )
    if broken:
        raise typer.Exit(CHECK_FAILED)


def _tell_history(
    folder: RunFolder, step: int | None, chunk: str | None, dataset_file: str | None, *, as_json: bool
) -> None:
    from dataclasses import asdict

    from penstock.observe.history import what_step_saw, who_trained

    if step is not None:
        seen = what_step_saw(folder, step, dataset_file)
        if as_json:
            print_json({"steps": [asdict(each) for each in seen]})
            return
        for each in seen:
            held = f"in checkpoint {each.checkpoint_id}" if each.checkpoint_id else "undone, or not committed yet"
            chunk_of = "" if each.block_id is None else f"chunk {each.chunk_id} of block {each.block_id}, "
            console().print(
                f"step {step} (generation {each.generation}), {_when(each.time)}: {each.worker}, epoch {each.epoch}, "
                f"{chunk_of}samples {_ranges(each.samples)}, loss {each.loss}; {held}"
            )
    if chunk is not None:
        trained = who_trained(folder, _chunk_ref(chunk))
        if as_json:
            print_json({"chunk": [asdict(each) for each in trained]})
            return
        for each in trained:
            console().print(
                f"epoch {each.epoch}: samples {each.start} to {each.stop - 1} of the chunk by {each.worker} in "
                f"{counted(each.steps, 'step')}, in checkpoint {each.checkpoint_id} of {_when(each.committed_at)}"
            )
        if not trained:
            console().print("no part of it is committed")


def _ranges(samples: list[list[int]]) -> str:
    return ", ".join(f"{first} to {stop - 1}" for first, stop in samples)


def skip(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit.")],
    samples: Annotated[list[str] | None, typer.Option(help="FIRST:STOP, ids of samples; may be repeated.")] = None,
    chunk: Annotated[list[str] | None, typer.Option(help="BLOCK/CHUNK; may be repeated.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="A block's number; may be repeated.")] = None,
    dataset_file: DatasetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exclude samples, chunks or blocks from every chunk that is begun from now on, also while a training runs."""
    from dataclasses import asdict

    from penstock.observe.run_folder import RunFolder
    from penstock.observe.skipping import skip_ranges

    folder = RunFolder(run)
    wanted = [tuple(part.partition(":")[::2]) for part in samples or []]
    if not all(first.isdecimal() and stop.isdecimal() for first, stop in wanted):
        raise typer.BadParameter("--samples takes FIRST:STOP, two numbers", param_hint="--samples")
    ranges = skip_ranges(
        folder,
        samples=[(int(first), int(stop)) for first, stop in wanted],
        chunks=[_chunk_ref(part) for part in chunk or []],
        blocks=block or [],
        dataset_file=dataset_file,
    )
    made = folder.ledger.exclude(ranges, reason)
    if as_json:
        print_json({"exclusions": [asdict(entry) for entry in made]})
        return
    for entry in made:
        console().print(_excluded(entry))


def _excluded(entry: Exclusion) -> str:
    stop = "its end" if entry.stop >= TO_THE_END else str(entry.stop - 1)
    return (
        f"excluded from epoch {entry.epoch}, step {entry.step} on: samples {entry.start} to {stop} "
        f"of block {entry.block_id}: {entry.reason}"
    )


def _chunk_ref(text: str) -> ChunkRef:
    block_id, _, chunk_id = text.partition("/")
    if not (block_id.isdecimal() and chunk_id.isdecimal()):
        raise typer.BadParameter(f"{text!r} is no chunk: expected BLOCK/CHUNK, two numbers", param_hint="--chunk")
    return ChunkRef(int(block_id), int(chunk_id))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


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


def _counts(found: EpochAudit) -> tuple[int, ...]:
    return found.epoch, found.samples, found.once, found.excluded, found.missing, found.twice


def print_audits(audits: list[EpochAudit]) -> None:
    """The proof as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), title="audit", title_justify="left")
    for name in ("epoch", "samples", "learned once", "excluded", "missing", "twice", ""):
        table.add_column(name, justify="right")
    for found in audits:
        verdict = Text("holds", "green") if found.holds else Text("not finished", "yellow")
        if found.twice or found.foreign or (found.missing and found is not audits[-1]):
            verdict = Text("does not hold", "red")
        table.add_row(*map(str, _counts(found)), verdict)
    console().print(table)

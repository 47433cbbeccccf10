"""What a step saw, and who trained a chunk: the metrics say what happened, the ledger's spans what of it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import LedgerError
from penstock.ledger import Commit, Span
from penstock.observe.run_folder import RunFolder
from penstock.types import ChunkRef


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """One optimizer step and the samples it was made of."""

    step: int
    generation: int
    worker: str
    session: int
    time: float
    epoch: int
    block_id: int | None
    """Of the chunk it was made of; None where the plan is strided and batches come from anywhere."""
    chunk_id: int | None
    samples: list[list[int]]
    """Ids of the samples of which it saw some token: ranges, from and to."""
    loss: float | None
    """None where it was not a number."""
    checkpoint_id: str | None
    """The first checkpoint that holds it; None where it was undone by a crash, or is not committed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTrained:
    """A part of a chunk, who trained it, and the checkpoint that holds it."""

    epoch: int
    block_id: int
    chunk_id: int
    start: int
    stop: int
    worker: str
    session: int
    steps: int
    checkpoint_id: str
    committed_at: float


def what_step_saw(run: RunFolder, step: int, dataset_file: str | None = None) -> list[StepSeen]:
    """Every time a step of this number was made; at most one of them is in a checkpoint.

    A run that goes back to a commit makes the later steps again, under the same numbers.
    """
    found = [event for event in run.events() if event.get("event") == "step" and event.get("step") == step]
    if not found:
        raise LedgerError(
            f"{run.path} has no step {step} in its metrics: expected 1 to {run.ledger.status().total_steps}; "
            "if the metrics were moved, put them back"
        )
    return _seen(run, found, dataset_file)


def skipped_steps(run: RunFolder) -> list[StepSeen]:
    """Steps whose batch was skipped for a loss that is not a number, as far as a checkpoint holds them: their samples
    count as seen, and taught nothing."""
    found = [event for event in run.events() if event.get("event") == "step" and event.get("skipped")]
    return [step for step in _seen(run, found) if step.checkpoint_id is not None]


def _seen(run: RunFolder, found: list[dict[str, Any]], dataset_file: str | None = None) -> list[StepSeen]:
    commits = {commit.seq: commit for commit in run.ledger.commits()} if found else {}
    if run.settings.get("plan") == "strided":
        return [_strided_step(run, event, commits, dataset_file) for event in found]
    return [
        StepSeen(
            step=event["step"],
            generation=event["generation"],
            worker=event["worker"],
            session=event["session"],
            time=event["time"],
            epoch=event["epoch"],
            block_id=event["block_id"],
            chunk_id=event["chunk_id"],
            samples=event.get("samples", []),
            loss=event["loss"],
            checkpoint_id=_checkpoint_of(run, event, commits),
        )
        for event in found
    ]


def _strided_step(
    run: RunFolder, event: dict[str, Any], commits: dict[int, Commit], dataset_file: str | None
) -> StepSeen:
    """What the plan says that a step saw, and the commit that holds it: of a crashed session, none."""
    from penstock.observe.strided import StridedRun

    span, samples = StridedRun(run, dataset_file).samples_of_step(event["step"])
    return StepSeen(
        step=event["step"],
        generation=event["generation"],
        worker=event["worker"],
        session=event["session"],
        time=event["time"],
        epoch=event["epoch"],
        block_id=None,
        chunk_id=None,
        samples=samples,
        loss=event["loss"],
        checkpoint_id=commits[span.commit].checkpoint_id if span and span.session == event["session"] else None,
    )


def _checkpoint_of(run: RunFolder, event: dict[str, object], commits: dict[int, Commit]) -> str | None:
    ref = ChunkRef(int(str(event["block_id"])), int(str(event["chunk_id"])))
    offset = event.get("start_offset", 0)
    for span in run.ledger.spans(int(str(event["epoch"]))):
        mine = span.ref == ref and span.session == event["session"]
        if mine and span.start_offset <= int(str(offset)) < max(span.stop_offset, span.start_offset + 1):
            return commits[span.commit].checkpoint_id
    return None


def who_trained(run: RunFolder, ref: ChunkRef) -> list[ChunkTrained]:
    """The committed parts of a chunk, epoch by epoch."""
    status = run.ledger.status()
    names = {worker.session_id: worker.worker for worker in status.workers}
    commits = {commit.seq: commit for commit in run.ledger.commits()}
    spans: list[Span] = []
    for epoch in range(status.epoch + 1):
        spans += [span for span in run.ledger.spans(epoch) if span.ref == ref]
    return [
        ChunkTrained(
            epoch=span.epoch,
            block_id=ref.block_id,
            chunk_id=ref.chunk_id,
            start=span.start,
            stop=span.stop,
            worker=names[span.session],
            session=span.session,
            steps=span.steps,
            checkpoint_id=commits[span.commit].checkpoint_id,
            committed_at=commits[span.commit].committed_at,
        )
        for span in spans
    ]

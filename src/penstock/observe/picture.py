"""One picture of a run: which worker learned which chunk, and the loss over the steps. An SVG: nothing to install."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.blocks import Manifest
from penstock.errors import StorageError
from penstock.observe.drawing import ALARM, GOOD, UNFINISHED, ChunkCell, LossPoint, Picture
from penstock.observe.proof import manifest_of, prove
from penstock.observe.run_folder import RunFolder


def draw_run(run: RunFolder, target: Path, dataset_file: str | None = None) -> Path:
    """Draw the run's current epoch; returns where the picture is."""
    status = run.ledger.status()
    workers = {worker.session_id: worker.worker for worker in status.workers}
    history = _read_history(run, status.epoch)
    audit = prove(run, dataset_file)[-1]
    manifest = manifest_of(run, dataset_file)
    picture = Picture(
        title=f"{run.dataset['name']}: epoch {status.epoch}, {status.total_steps} steps",
        verdict=f"{audit.samples} samples: {audit.once} learned once, {audit.missing} missing, {audit.twice} twice",
        colour=GOOD if audit.holds else ALARM if audit.twice or audit.foreign else UNFINISHED,
        cells=_cells(run, manifest, status.epoch, workers, history.redone),
        points=sorted(history.points, key=lambda point: point.step),
        lost=history.lost,
        workers=sorted(set(workers.values())),
    )
    try:
        target.write_text(picture.svg(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the picture {target} cannot be written: {error.strerror or error}") from error
    return target


def _cells(
    run: RunFolder, manifest: Manifest, epoch: int, workers: dict[int, str], lost_chunks: set[tuple[int, int]]
) -> list[list[ChunkCell]]:
    """A row a block, a cell a chunk, each with the shares its learners had."""
    shares: dict[tuple[int, int], dict[str, int]] = {}
    for span in run.ledger.spans(epoch):
        share = shares.setdefault((span.ref.block_id, span.ref.chunk_id), {})
        worker = workers.get(span.session, f"session {span.session}")
        share[worker] = share.get(worker, 0) + span.stop - span.start
    rows = []
    chunk_size = run.ledger.status().chunk_size
    for block in manifest.blocks:
        chunks = -(-block.sample_count // chunk_size)
        rows.append(
            [
                ChunkCell(
                    block.block_id,
                    chunk_id,
                    min(chunk_size, block.sample_count - chunk_id * chunk_size),
                    shares.get((block.block_id, chunk_id), {}),
                    (block.block_id, chunk_id) in lost_chunks,
                )
                for chunk_id in range(chunks)
            ]
        )
    return rows


@dataclass(slots=True)
class _History:
    """What the metrics file tells of one epoch."""

    points: list[LossPoint] = field(default_factory=list)
    redone: set[tuple[int, int]] = field(default_factory=set)
    """Chunks that a lost worker had begun since the last commit."""
    lost: list[tuple[int, str]] = field(default_factory=list)


def _read_history(run: RunFolder, epoch: int) -> _History:
    """Read the metrics file; steps that a resumed run went back behind are left out, as if they had never been."""
    history = _History()
    begun: dict[int, set[tuple[int, int]]] = {}
    for event in run.events():
        kind = event.get("event")
        if kind == "step" and event["epoch"] == epoch:
            history.points.append(LossPoint(event["step"], event["loss"], event["worker"]))
            begun.setdefault(event["session"], set()).add((event["block_id"], event["chunk_id"]))
        elif kind == "commit":
            begun.clear()
        elif kind == "worker_lost":
            history.redone |= begun.pop(event["session"], set())
            history.lost.append((history.points[-1].step if history.points else 0, event["worker"]))
        elif kind == "run_started":
            history.points = [point for point in history.points if point.step < event["next_step"]]
            history.redone |= {chunk for chunks in begun.values() for chunk in chunks}
            begun.clear()
    return history

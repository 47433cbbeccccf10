"""The drawing itself: shapes and words from values, no reading of anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.observe import svg

COLOURS = ("#2f6f9f", "#e08a1e", "#5a9a4a", "#a05195", "#d1495b", "#4c5c68", "#8d6a3f", "#2a9d8f")
_INK, _FAINT, _GRID, _EMPTY = "#1f2933", "#6b7785", "#e4e8ec", "#eef1f4"
ALARM, GOOD, UNFINISHED = "#c8102e", "#2e7d32", "#e0a800"
_WIDTH, _MARGIN = 960, 48
_LEFT, _RIGHT = _MARGIN + 56, _WIDTH - _MARGIN
_CURVE_HEIGHT = 240
_MAX_CELLS_IN_ROW = 100
_MAX_ROWS = 48
_MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class ChunkCell:
    """One chunk: how many samples, who learned how many of them, and whether a lost worker had begun it."""

    block_id: int
    chunk_id: int
    samples: int
    learned: dict[str, int]
    begun_by_lost: bool


@dataclass(frozen=True, slots=True)
class LossPoint:
    step: int
    loss: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that is drawn."""

    title: str
    verdict: str
    colour: str
    """Of the dot beside the verdict."""
    cells: list[list[ChunkCell]]
    """A list a block."""
    points: list[LossPoint]
    """By step."""
    lost: list[tuple[int, str]]
    """After which step which worker was lost."""
    workers: list[str]

    def svg(self) -> str:
        chunk_map, map_bottom = self._chunk_map(top=120)
        curve, bottom = self._curve(top=map_bottom + 64)
        head = [
            svg.text(_MARGIN, 44, self.title, size=22, fill=_INK, bold=True),
            svg.dot(_MARGIN + 6, 64, 5, fill=self.colour),
            svg.text(_MARGIN + 18, 69, self.verdict, size=14, fill=_INK),
        ]
        return svg.document(_WIDTH, bottom, [*head, *self._legend(y=98), *chunk_map, *curve])

    def _colour(self, worker: str) -> str:
        place = self.workers.index(worker) if worker in self.workers else len(self.workers)
        return COLOURS[place % len(COLOURS)]

    def _legend(self, y: int) -> list[str]:
        shapes, x = [], _MARGIN
        for worker in self.workers:
            learned = sum(cell.learned.get(worker, 0) for row in self.cells for cell in row)
            label = f"{worker} ({learned} samples)"
            shapes += [svg.box(x, y - 11, 12, 12, fill=self._colour(worker)), svg.text(x + 18, y, label, fill=_FAINT)]
            x += 34 + 7 * len(label)
        if any(cell.begun_by_lost for row in self.cells for cell in row):
            label = "begun by a worker that died, learned again by another"
            shapes += [svg.frame(x, y - 11, 12, 12, stroke=ALARM), svg.text(x + 18, y, label, fill=_FAINT)]
        return shapes

    def _chunk_map(self, top: int) -> tuple[list[str], int]:
        rows = _fold(self.cells)
        widest = max((len(cells) for _, cells in rows), default=1)
        pitch = min(30.0, (_RIGHT - _LEFT) / widest)
        height = max(6.0, min(24.0, pitch))
        gap = 1.0 if pitch < 12 else 2.0
        shapes = []
        for place, (label, cells) in enumerate(rows):
            y = top + place * (height + gap)
            shapes.append(svg.text(_LEFT - 8, y + height / 2 + 4, label, size=11, fill=_FAINT, anchor="end"))
            for column, cell in enumerate(cells):
                shapes.append(self._cell(cell, _LEFT + column * pitch, y, pitch - gap, height))
        return shapes, math.ceil(top + len(rows) * (height + gap))

    def _cell(self, cell: ChunkCell, x: float, y: float, width: float, height: float) -> str:
        told = ", ".join(f"{worker} {count}" for worker, count in sorted(cell.learned.items())) or "nothing yet"
        shapes = [svg.box(x, y, width, height, fill=_EMPTY)]
        at = x
        for worker, count in sorted(cell.learned.items()):
            part = width * count / max(1, cell.samples)
            shapes.append(svg.box(at, y, part, height, fill=self._colour(worker)))
            at += part
        if cell.begun_by_lost:
            shapes.append(svg.frame(x, y, width, height, stroke=ALARM))
        return svg.titled(f"block {cell.block_id}, chunk {cell.chunk_id}: {told} of {cell.samples} samples", shapes)

    def _curve(self, top: int) -> tuple[list[str], int]:
        shapes = [svg.text(_MARGIN, top - 24, "loss by step", size=14, fill=_INK, bold=True)]
        points = self.points[:: max(1, len(self.points) // _MAX_POINTS)]
        if not points:
            return [*shapes, svg.text(_LEFT, top, "no steps yet", fill=_FAINT)], top + 40
        axes = _Axes.around(points, top)
        shapes += axes.grid()
        for point in points:
            shapes.append(svg.dot(*axes.at(point.step, point.loss), 1.6, fill=self._colour(point.worker), opacity=0.45))
        shapes.append(svg.line([axes.at(step, loss) for step, loss in _smoothed(points)], stroke=_INK, width=1.8))
        for step, worker in self.lost:
            x, _ = axes.at(min(max(step, axes.first), axes.last), axes.low)
            side, anchor = (-6, "end") if x > (_LEFT + _RIGHT) / 2 else (6, "start")
            shapes.append(svg.line([(x, top), (x, top + _CURVE_HEIGHT)], stroke=ALARM, dashed=True))
            shapes.append(svg.text(x + side, top + 12, f"{worker} died", size=12, fill=ALARM, anchor=anchor))
        return shapes, top + _CURVE_HEIGHT + 40


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a step and a loss are on the page."""

    first: int
    last: int
    low: float
    high: float
    top: int

    @classmethod
    def around(cls, points: list[LossPoint], top: int) -> _Axes:
        low, high = min(point.loss for point in points), max(point.loss for point in points)
        first = points[0].step
        return cls(first, max(points[-1].step, first + 1), low, high if high > low else low + 1, top)

    def at(self, step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (_RIGHT - _LEFT) * (step - self.first) / (self.last - self.first)
        return x, self.top + _CURVE_HEIGHT * (self.high - loss) / (self.high - self.low)

    def grid(self) -> list[str]:
        shapes = []
        for tick in range(5):
            loss = self.low + (self.high - self.low) * tick / 4
            step = self.first + (self.last - self.first) * tick / 4
            x, y = self.at(step, loss)
            shapes.append(svg.line([(_LEFT, y), (_RIGHT, y)], stroke=_GRID))
            shapes.append(svg.text(_LEFT - 8, y + 4, f"{loss:.2f}", size=11, fill=_FAINT, anchor="end"))
            below = self.top + _CURVE_HEIGHT + 18
            shapes.append(svg.text(x, below, f"{step:.0f}", size=11, fill=_FAINT, anchor="middle"))
        return shapes


def _fold(blocks: list[list[ChunkCell]]) -> list[tuple[str, list[ChunkCell]]]:
    """Rows that fit the page: a block a row where possible, else all chunks in reading order, thinned if need be."""
    if len(blocks) <= _MAX_ROWS and all(len(block) <= _MAX_CELLS_IN_ROW for block in blocks):
        return [(f"block {cells[0].block_id}", cells) for cells in blocks if cells]
    cells = [cell for block in blocks for cell in block]
    group = max(1, math.ceil(len(cells) / (_MAX_ROWS * _MAX_CELLS_IN_ROW)))
    shown = [_joined(cells[start : start + group]) for start in range(0, len(cells), group)]
    rows = [shown[start : start + _MAX_CELLS_IN_ROW] for start in range(0, len(shown), _MAX_CELLS_IN_ROW)]
    return [(f"block {row[0].block_id}", row) for row in rows]


def _joined(cells: list[ChunkCell]) -> ChunkCell:
    learned: dict[str, int] = {}
    for cell in cells:
        for worker, count in cell.learned.items():
            learned[worker] = learned.get(worker, 0) + count
    begun = any(cell.begun_by_lost for cell in cells)
    return ChunkCell(cells[0].block_id, cells[0].chunk_id, sum(cell.samples for cell in cells), learned, begun)


def _smoothed(points: list[LossPoint]) -> list[tuple[int, float]]:
    """An exponential mean over the steps, in their order."""
    keep = 1 - 1 / max(2, min(50, len(points) // 20))
    mean = points[0].loss
    smooth = []
    for point in points:
        mean = keep * mean + (1 - keep) * point.loss
        smooth.append((point.step, mean))
    return smooth

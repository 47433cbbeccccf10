"""A picture of contributions by window: a row a miner, a column a window. An SVG: nothing to install."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import StorageError
from penstock.exchange.manifests import Manifest
from penstock.exchange.status import RunStatus
from penstock.observe import svg

_INK, _FAINT, _EMPTY = "#1f2933", "#6b7785", "#eef1f4"
_KINDS = {
    "taken": ("#5a9a4a", "taken"),
    "reserve": ("#2f6f9f", "taken, as a reserve"),
    "rejected": ("#c8102e", "rejected"),
    "missing": ("#e0a800", "missing"),
}
_WIDTH, _MARGIN, _LABELS, _ROW = 960, 48, 130, 26
_WIDEST = 28.0


def draw_exchange(status: RunStatus, target: Path) -> Path:
    """Draw the windows that were looked at; returns where the picture is."""
    try:
        target.write_text(_drawn(status), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the picture {target} cannot be written: {error.strerror or error}") from error
    return target


def _drawn(status: RunStatus) -> str:
    windows = status.windows
    pitch = min(_WIDEST, (_WIDTH - 2 * _MARGIN - _LABELS) / max(1, len(windows)))
    told = status.as_dict()
    ratio = told["bytes"]["ratio"]
    shapes = [
        svg.text(_MARGIN, 44, f"{told['run']}: {status.closed} windows closed", size=22, fill=_INK, bold=True),
        svg.text(
            _MARGIN,
            68,
            f"{told['num_weights']:,} weights; contributions {ratio or '-'} times smaller than dense",
            size=14,
            fill=_INK,
        ),
        *_legend(),
    ]
    top = 124
    for place, uid in enumerate(status.members):
        y = top + place * _ROW
        shapes.append(svg.text(_MARGIN, y + 15, uid, fill=_FAINT))
        for column, window in enumerate(windows):
            shapes.append(_cell(uid, window, _MARGIN + _LABELS + column * pitch, y, pitch - 2))
    bottom = top + len(status.members) * _ROW
    every = max(1, len(windows) // 12)
    for column, window in enumerate(windows):
        if column % every == 0:
            x = _MARGIN + _LABELS + column * pitch
            shapes.append(svg.text(x, bottom + 14, str(window.window), size=11, fill=_FAINT))
    return svg.document(_WIDTH, bottom + 48, shapes)


def _legend() -> list[str]:
    shapes: list[str] = []
    x = _MARGIN
    for colour, words in _KINDS.values():
        shapes += [svg.box(x, 87, 12, 12, fill=colour), svg.text(x + 18, 98, words, fill=_FAINT)]
        x += 44 + 7 * len(words)
    return shapes


def _cell(uid: str, window: Manifest, x: float, y: float, width: float) -> str:
    kind, words = _kind(uid, window)
    colour = _KINDS[kind][0] if kind else _EMPTY
    title = f"window {window.window}, {uid}: {words}"
    return svg.titled(title, [svg.box(x, y, width, _ROW - 6, fill=colour)])


def _kind(uid: str, window: Manifest) -> tuple[str, str]:
    for taken in window.contributions:
        if taken.uid == uid:
            kind = "reserve" if taken.is_reserve else "taken"
            return kind, f"{_KINDS[kind][1]}, {taken.size_bytes:,} bytes"
    for rejected in window.rejected:
        if rejected.uid == uid and rejected.window == window.window:
            return "rejected", f"{rejected.reason}: {rejected.told}"
    return ("missing", "missing") if uid in window.missing else ("", "not expected")

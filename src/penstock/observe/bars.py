"""Figures of several settings as bars, the largest on top: to look at instead of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.observe import svg

_INK, _FAINT, _BAR, _BEST = "#1f2933", "#6b7785", "#2f6f9f", "#5a9a4a"
_WIDTH, _MARGIN, _ROW, _BAR_HEIGHT = 960, 32, 30, 18
_LABELS, _NOTES = 330, 240


class Bar(NamedTuple):
    """One setting."""

    label: str
    value: float
    note: str = ""
    """Said behind the bar."""


def draw_bars(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """An SVG of bars, sorted by value."""
    ranked = sorted(bars, key=lambda bar: -bar.value)
    most = max((bar.value for bar in ranked), default=0.0) or 1.0
    room = _WIDTH - 2 * _MARGIN - _LABELS - _NOTES
    shapes = [
        svg.text(_MARGIN, 40, title, size=20, fill=_INK, bold=True),
        svg.text(_MARGIN, 62, unit, fill=_FAINT),
    ]
    for place, bar in enumerate(ranked):
        top = 84 + place * _ROW
        length = max(1.0, room * bar.value / most)
        words = f"{bar.value:,.3g}" if bar.value < 1_000 else f"{bar.value:,.0f}"
        shapes += [
            svg.text(_MARGIN, top + 14, bar.label, fill=_INK),
            svg.box(_MARGIN + _LABELS, top, length, _BAR_HEIGHT, fill=_BAR if place else _BEST),
            svg.text(_MARGIN + _LABELS + length + 8, top + 14, f"{words}   {bar.note}".rstrip(), fill=_FAINT),
        ]
    return svg.document(_WIDTH, 84 + max(1, len(ranked)) * _ROW + _MARGIN, shapes)

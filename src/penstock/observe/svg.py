"""A few shapes of SVG, as strings."""

from __future__ import annotations

from xml.sax.saxutils import escape


def text(
    x: float, y: float, words: str, *, size: int = 13, fill: str, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, *, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}"/>'


def frame(x: float, y: float, width: float, height: float, *, stroke: str) -> str:
    """The outline of a box, drawn inside it."""
    return (
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}" '
        f'fill="none" stroke="{stroke}" stroke-width="2"/>'
    )


def dot(x: float, y: float, radius: float, *, fill: str, opacity: float = 1.0) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" opacity="{opacity}"/>'


def line(points: list[tuple[float, float]], *, stroke: str, width: float = 1.0, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}/>'


def titled(title: str, shapes: list[str]) -> str:
    """Shapes that show words when pointed at."""
    return f"<g><title>{escape(title)}</title>{''.join(shapes)}</g>"


def document(width: int, height: int, shapes: list[str]) -> str:
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )

"""Cutting a byte stream into groups of lines, each with the cursor it starts at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from penstock.sources.base import Cursor
from penstock.sources.streams import FAILURES

GROUP_BYTES = 1 << 20
"""How much is read at a time; a longer line is read whole all the same."""

_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class LineGroup:
    start: Cursor
    lines: list[bytes]


def line_groups(file: BinaryIO, start: Cursor) -> Iterator[LineGroup]:
    """Groups of lines, newline included, from a stream that stands at `start.offset`. A leading BOM is dropped.

    A failure to read comes behind the whole lines before it.
    """
    offset, row = start.offset, start.row
    while True:
        group = LineGroup(replace(start, offset=offset, row=row, skip=0), [])
        try:
            size = _take(file, group.lines)
        except FAILURES:
            if group.lines:
                yield _without_bom(group)
            raise
        if not size:
            return
        offset += size
        row += len(group.lines)
        yield _without_bom(group)


def _take(file: BinaryIO, lines: list[bytes]) -> int:
    """Append lines until they are enough; return their bytes."""
    size = 0
    for line in file:
        lines.append(line)
        size += len(line)
        if size >= GROUP_BYTES:
            break
    return size


def _without_bom(group: LineGroup) -> LineGroup:
    if group.start.offset == 0 and group.lines[0].startswith(_BOM):
        group.lines[0] = group.lines[0].removeprefix(_BOM)
        if not group.lines[0]:
            group.lines.clear()  # nothing but a BOM is an empty file, not a blank line
    return group

"""Cutting a byte stream into groups of lines, each with the cursor it starts at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from penstock.sources.base import Cursor

GROUP_BYTES = 1 << 20
"""How much is read at a time; a longer line is read whole all the same."""

_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class LineGroup:
    start: Cursor
    lines: list[bytes]


def line_groups(file: BinaryIO, start: Cursor) -> Iterator[LineGroup]:
    """Groups of lines, newline included, from a stream that stands at `start.offset`. A leading BOM is dropped."""
    offset, row = start.offset, start.row
    while lines := file.readlines(GROUP_BYTES):
        size = sum(map(len, lines))
        group = LineGroup(replace(start, offset=offset, row=row, skip=0), lines)
        if offset == 0 and lines[0].startswith(_BOM):
            lines[0] = lines[0].removeprefix(_BOM)
            if not lines[0]:
                return  # nothing but a BOM is an empty file, not a blank line
        offset += size
        row += len(lines)
        yield group

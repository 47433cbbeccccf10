"""JSON lines: one object a line, stored byte for byte as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from penstock.sources.base import BadRow, Cursor, RowBatch
from penstock.sources.lines import line_groups
from penstock.sources.values import json_kind, why_not_json


def read_jsonl(file: BinaryIO, name: str, start: Cursor) -> Iterator[RowBatch]:
    """Rows of one JSONL file. Blank lines are nothing; what is not a JSON object is a bad row."""
    loads = orjson.loads
    for group in line_groups(file, start):
        batch = RowBatch(file_name=name, start=group.start)
        values, lines = batch.values, batch.lines
        for number, line in enumerate(group.lines, group.start.row + 1):
            try:
                value = loads(line)
            except orjson.JSONDecodeError as error:
                if line.strip():
                    batch.bad.append(
                        BadRow(before=len(lines), position=f"{name}:{number}", reason=why_not_json(line, error))
                    )
                continue
            if type(value) is not dict:
                reason = f"a JSON {json_kind(value)}, expected an object"
                batch.bad.append(BadRow(before=len(lines), position=f"{name}:{number}", reason=reason))
                continue
            values.append(value)
            batch.numbers.append(number)
            lines.append(line if line[:1] == b"{" and line[-2:] == b"}\n" else line.strip() + b"\n")
        yield batch

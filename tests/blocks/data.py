"""Small data sets, and ways to look at a whole block store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from equipment.trees import tree
from penstock.blocks import BlockManager, BlockStore, verify_blocks


def write_jsonl(path: Path, rows: Sequence[dict[str, Any] | bytes]) -> Path:
    """A JSONL file; bytes stand for a line as it is, such as a bad one."""
    lines = (row if isinstance(row, bytes) else orjson.dumps(row) for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    """Rows that know their number, of growing length."""
    return [{"text": f"sample {number} " + "x" * (number % 7), "id": number} for number in range(count)]


def all_rows(path: Path | str, chunk_size: int = 3) -> list[dict[str, Any]]:
    """Every row of a block store, through its chunks, in order."""
    manager = BlockManager(path, dataset_chunk_size=chunk_size)
    return [
        row
        for block in manager.manifest.blocks
        for chunk_id in range(manager.get_block(block.block_id).chunk_count(chunk_size))
        for row in manager.get_rows(block.block_id, chunk_id)
    ]


def leftovers(path: Path) -> list[str]:
    """Temporary files and locks that should have gone."""
    return [name for name in tree(path) if "penstock-" in name]


def damages(path: Path | str) -> dict[str, str]:
    """What verifying finds: reasons by file."""
    found = verify_blocks(BlockStore.open(path))
    return {damage.file: damage.reason for _, damages in found for damage in damages}

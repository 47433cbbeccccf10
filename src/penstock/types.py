"""Small values that several layers speak of. Named tuples are those made for every claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ChunkRef(NamedTuple):
    """Names one chunk: its block and its place in that block."""

    block_id: int
    chunk_id: int


class BlockFacts(NamedTuple):
    """What a ledger has to know about a block before it can hand out its chunks."""

    sample_count: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetIdentity:
    """What makes two data sets the same one: where it came from and how it was cut."""

    dataset_id: str
    """Hash of the source, its revision and the ingest options; known before the first block."""
    block_size: int
    chunk_size: int

    def as_dict(self) -> dict[str, object]:
        return {"dataset_id": self.dataset_id, "block_size": self.block_size, "chunk_size": self.chunk_size}

"""The claims plan: block by block, chunk by chunk; the next untrained chunk goes to whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.types import ChunkRef


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk and how many samples it holds."""

    ref: ChunkRef
    sample_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsPlan:
    """Chunks of `chunk_size` consecutive samples; the last of a block may be short."""

    chunk_size: int

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size={self.chunk_size} cannot hold a sample: expected 1 or more")

    def chunk_count(self, block_samples: int) -> int:
        return -(-block_samples // self.chunk_size)

    def chunk_samples(self, chunk_id: int, block_samples: int) -> int:
        return min(self.chunk_size, block_samples - chunk_id * self.chunk_size)

    def after(self, last: ChunkRef | None, block_samples: Callable[[int], int | None]) -> PlannedChunk | None:
        """The chunk that follows `last`, or the first one; None where the blocks known so far end.

        Costs the same anywhere in the data set; only empty blocks, which are passed over, add to it.

        Args:
            last: The chunk handed out before.
            block_samples: Sample count of a block, None where there is no such block yet.
        """
        block_id, chunk_id = (0, 0) if last is None else (last.block_id, last.chunk_id + 1)
        samples = block_samples(block_id)
        while samples is not None and chunk_id >= self.chunk_count(samples):
            block_id, chunk_id = block_id + 1, 0
            samples = block_samples(block_id)
        if samples is None:
            return None
        return PlannedChunk(ChunkRef(block_id, chunk_id), self.chunk_samples(chunk_id, samples))

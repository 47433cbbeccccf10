"""The exclusion journal: which samples are not to be learned, from when on, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.types import ChunkRef

TO_THE_END = 2**62
"""As a `stop`: to the end of the block, however long it turns out to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Samples ``[start, stop)`` of a block. Holds for every chunk that is begun after it was made."""

    seq: int
    epoch: int
    """The epoch and"""
    step: int
    """the step from which it holds: later ones do not see these samples in chunks they begin."""
    block_id: int
    start: int
    stop: int
    reason: str
    excluded_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRange:
    """Samples ``[start, stop)`` of a block that are to be excluded."""

    block_id: int
    start: int = 0
    stop: int = TO_THE_END


class Exclusions:
    """The journal, asked by chunk. Costs what the entries of the chunk's block cost."""

    def __init__(self, entries: Iterable[Exclusion] = ()) -> None:
        self.entries = sorted(entries, key=lambda entry: entry.seq)
        self._by_block: dict[int, list[Exclusion]] = {}
        for entry in self.entries:
            self._by_block.setdefault(entry.block_id, []).append(entry)

    def __len__(self) -> int:
        return len(self.entries)

    def within(self, block_id: int, start: int, stop: int, upto: int | None = None) -> list[tuple[int, int]]:
        """What of samples ``[start, stop)`` of a block is excluded by the journal's first `upto` entries: disjoint
        ranges, in order."""
        found: list[tuple[int, int]] = []
        for entry in sorted(self._by_block.get(block_id, ()), key=lambda entry: entry.start):
            low, high = max(start, entry.start), min(stop, entry.stop)
            if (upto is not None and entry.seq > upto) or low >= high:
                continue
            if found and low <= found[-1][1]:
                found[-1] = (found[-1][0], max(high, found[-1][1]))
            else:
                found.append((low, high))
        return found

    def of_chunk(self, ref: ChunkRef, samples: int, chunk_size: int, upto: int | None = None) -> list[tuple[int, int]]:
        """The same of a chunk, counted from its start."""
        first = ref.chunk_id * chunk_size
        return [(low - first, high - first) for low, high in self.within(ref.block_id, first, first + samples, upto)]

    def covers(self, ref: ChunkRef, samples: int, chunk_size: int) -> bool:
        """Whether nothing of a chunk is left to learn."""
        return samples > 0 and self.of_chunk(ref, samples, chunk_size) == [(0, samples)]

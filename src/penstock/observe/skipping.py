"""From what a user names (ids of samples, chunks, blocks) to ranges of samples in blocks, which the ledger excludes."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.ledger import SkipRange
from penstock.observe.proof import manifest_of
from penstock.observe.run_folder import RunFolder
from penstock.types import ChunkRef


def skip_ranges(
    run: RunFolder,
    *,
    samples: list[tuple[int, int]],
    chunks: list[ChunkRef],
    blocks: list[int],
    dataset_file: str | None = None,
) -> list[SkipRange]:
    """The ranges that are named; what the data set does not have is refused, and nothing changed."""
    manifest = manifest_of(run, dataset_file)
    chunk_size = run.ledger.status().chunk_size
    found = [SkipRange(block_id=block_id) for block_id in blocks]
    for ref in chunks:
        first = ref.chunk_id * chunk_size
        found.append(SkipRange(block_id=ref.block_id, start=first, stop=first + chunk_size))
    for first, stop in samples:
        if not 0 <= first < stop <= manifest.total_samples:
            raise ConfigError(
                f"samples {first}:{stop} are not of this data set: expected 0 <= FIRST < STOP <= "
                f"{manifest.total_samples}; nothing was excluded"
            )
        for entry in manifest.blocks:
            low, high = max(first, entry.start_index), min(stop, entry.end_index)
            if low < high:
                base = entry.start_index
                found.append(SkipRange(block_id=entry.block_id, start=low - base, stop=high - base))
    sizes = {entry.block_id: entry.sample_count for entry in manifest.blocks}
    for skip in found:
        if skip.block_id not in sizes or skip.start >= sizes[skip.block_id]:
            raise ConfigError(
                f"{skip} is not in this data set: it has blocks 0 to {len(sizes) - 1}, "
                f"of {sizes.get(skip.block_id, 0)} samples in this one; nothing was excluded"
            )
    if not found:
        raise ConfigError("nothing to skip was named: expected --samples, --chunk or --block")
    return found

"""The feed of the claims plan: the batches of one leased chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed.packing import Batch, PackedWindow, pack_window
from penstock.feed.tokenizer import Tokenizer
from penstock.types import ChunkRef


class ChunkFeed:
    """Reads, tokenises and packs chunks. Holds one chunk in memory at a time and no state between chunks."""

    def __init__(self, blocks: BlockManager, tokenizer: Tokenizer, *, batch_size: int, sequence_length: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} holds no sequence: expected 1 or more")
        self._blocks = blocks
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._sequence_length = sequence_length

    def window(self, ref: ChunkRef, excluded: Iterable[tuple[int, int]] = ()) -> PackedWindow:
        """A chunk, packed; the same on every call with the same samples excluded (from and to, in the chunk)."""
        texts = self._blocks.get_chunk(ref.block_id, ref.chunk_id)
        wanted = np.ones(len(texts), dtype=bool)
        for start, stop in excluded:
            wanted[start:stop] = False
        encoded = self._tokenizer.encode([text for text, learn in zip(texts, wanted, strict=True) if learn])
        # An excluded sample keeps its place and has no tokens, so that counting samples needs no second numbering.
        lengths = np.zeros(len(texts), dtype=encoded.offsets.dtype)
        lengths[wanted] = np.diff(encoded.offsets)
        block = self._blocks.get_block(ref.block_id)
        return pack_window(
            encoded.ids,
            np.concatenate([encoded.offsets[:1], np.cumsum(lengths)]).astype(encoded.offsets.dtype),
            first_sample_id=block.start_index + ref.chunk_id * self._blocks.dataset_chunk_size,
            sequence_length=self._sequence_length,
            pad_id=self._tokenizer.end_of_text_id,
            excluded=None if wanted.all() else ~wanted,
        )

    def batches(
        self, ref: ChunkRef, start_offset: int = 0, excluded: Iterable[tuple[int, int]] = ()
    ) -> Iterator[Batch]:
        """The chunk's batches from a sequence offset on, without the excluded samples."""
        yield from self.window(ref, excluded).batches(self._batch_size, start_offset)

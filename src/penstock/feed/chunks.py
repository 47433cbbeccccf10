"""The feed of the claims plan: the batches of one leased chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed.packing import Batch, PackedWindow, pack_window
from penstock.feed.tokenizer import Encoded, Tokenizer
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

    def window(self, ref: ChunkRef) -> PackedWindow:
        """A chunk, packed; the same on every call."""
        block = self._blocks.get_block(ref.block_id)
        first_sample_id = block.start_index + ref.chunk_id * self._blocks.dataset_chunk_size
        encoded = self._encoded(ref, first_sample_id)
        return pack_window(
            encoded.ids,
            encoded.offsets,
            first_sample_id=first_sample_id,
            sequence_length=self._sequence_length,
            pad_id=self._tokenizer.end_of_text_id,
        )

    def _encoded(self, ref: ChunkRef, first_sample_id: int) -> Encoded:
        if self._blocks.manifest.header.token_column is None:
            return self._tokenizer.encode(self._blocks.get_chunk(ref.block_id, ref.chunk_id))
        ids, offsets = self._blocks.get_tokens(ref.block_id, ref.chunk_id)
        foreign = np.flatnonzero(ids >= self._vocab_size)
        if len(foreign):
            sample_id = first_sample_id + int(np.searchsorted(offsets, foreign[0], side="right")) - 1
            raise ConfigError(
                f"sample {sample_id} holds token {ids[foreign[0]]}, the tokenizer has {self._vocab_size}: "
                "name the tokenizer that this data set was made with"
            )
        return Encoded(ids, offsets)

    @cached_property
    def _vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def batches(self, ref: ChunkRef, start_offset: int = 0) -> Iterator[Batch]:
        """The chunk's batches from a sequence offset on."""
        yield from self.window(ref).batches(self._batch_size, start_offset)

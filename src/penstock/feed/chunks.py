"""The feed of the claims plan: the batches of one leased chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        self.batch_size = batch_size
        self._sequence_length = sequence_length

    def window(self, ref: ChunkRef, excluded: Iterable[tuple[int, int]] = ()) -> PackedWindow:
        """A chunk, packed; the same on every call with the same samples excluded (from and to, in the chunk)."""
        block = self._blocks.get_block(ref.block_id)
        size = self._blocks.dataset_chunk_size
        first = ref.chunk_id * size
        wanted = np.ones(min(size, block.sample_count - first), dtype=bool)
        for start, stop in excluded:
            wanted[start:stop] = False
        encoded = self._encoded(ref, block.start_index + first, wanted)
        return pack_window(
            encoded.ids,
            encoded.offsets,
            first_sample_id=block.start_index + first,
            sequence_length=self._sequence_length,
            pad_id=self._tokenizer.end_of_text_id,
            excluded=None if wanted.all() else ~wanted,
        )

    def following(self, ref: ChunkRef) -> ChunkRef | None:
        """The chunk behind a chunk in the data set; None behind the last one known."""
        if self._blocks.get_block(ref.block_id).chunk_count(self._blocks.dataset_chunk_size) > ref.chunk_id + 1:
            return ChunkRef(ref.block_id, ref.chunk_id + 1)
        return ChunkRef(ref.block_id + 1, 0) if self._blocks.facts(ref.block_id + 1) else None

    def batches(
        self, ref: ChunkRef, start_offset: int = 0, excluded: Iterable[tuple[int, int]] = ()
    ) -> Iterator[Batch]:
        """The chunk's batches from a sequence offset on, without the excluded samples."""
        yield from self.window(ref, excluded).batches(self.batch_size, start_offset)

    def _encoded(self, ref: ChunkRef, first_sample_id: int, wanted: np.ndarray) -> Encoded:
        """The tokens of a chunk. An excluded sample keeps its place and has no tokens, so that counting samples needs
        no second numbering."""
        if self._blocks.manifest.header.token_column is None:
            texts = self._blocks.get_chunk(ref.block_id, ref.chunk_id)
            kept = texts if wanted.all() else [text for text, learn in zip(texts, wanted, strict=True) if learn]
            encoded = self._tokenizer.encode(kept)
            if len(kept) == len(texts):
                return encoded
            lengths = np.zeros(len(texts), dtype=np.int64)
            lengths[wanted] = np.diff(encoded.offsets)
            return Encoded(encoded.ids, np.concatenate([[0], np.cumsum(lengths)]))
        ids, offsets = self._blocks.get_tokens(ref.block_id, ref.chunk_id)
        if not wanted.all():
            lengths = np.diff(offsets)
            ids = ids[np.repeat(wanted, lengths)]
            offsets = np.concatenate([[0], np.cumsum(np.where(wanted, lengths, 0))])
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

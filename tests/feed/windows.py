"""Windows to pack: documents whose every token is told from every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from penstock.feed import PackedWindow, pack_window

PAD = 7
FIRST_TOKEN = 1_000
FIRST_SAMPLE = 50


@dataclass(frozen=True)
class Documents:
    """Documents by their lengths; token ids count up from `FIRST_TOKEN`, sample ids from `FIRST_SAMPLE`."""

    lengths: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        return [FIRST_TOKEN + place for place in range(sum(self.lengths))]

    @property
    def document_of_token(self) -> list[int]:
        return [document for document, length in enumerate(self.lengths) for _ in range(length)]

    @property
    def place_in_document(self) -> list[int]:
        return [place for length in self.lengths for place in range(length)]

    @property
    def sample_ids(self) -> list[int]:
        return [FIRST_SAMPLE + document for document in range(len(self.lengths))]

    def packed(self, sequence_length: int) -> PackedWindow:
        return pack_window(
            np.array(self.tokens, dtype=np.int64),
            np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64),
            first_sample_id=FIRST_SAMPLE,
            sequence_length=sequence_length,
            pad_id=PAD,
        )


documents = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any).map(Documents)
"""Some documents; empty ones among them, at any place, but not all of them."""
sequence_lengths = st.integers(2, 9)
batch_sizes = st.integers(1, 5)

"""Which tokens are learned: marks on tokens, and labels."""

from __future__ import annotations

import numpy as np

IGNORED_LABEL = -100
"""Label of a place that nothing is learned from: behind a document's end, before what is not to be learned, padding."""
MASKED = np.uint32(1 << 31)
"""Set on a token that is read and not learned, where a token cache holds such."""


def labels_of(ids: np.ndarray, *, masked: bool) -> np.ndarray:
    """Tokens as labels; where they may carry a mark, `IGNORED_LABEL` for those that do."""
    if not masked:
        return ids.astype(np.int64)
    return np.where(ids & MASKED, IGNORED_LABEL, (ids & ~MASKED).astype(np.int64))


def plain_ids(ids: np.ndarray, *, masked: bool) -> np.ndarray:
    """Tokens as a model reads them; themselves where none carries a mark."""
    return ids & ~MASKED if masked else ids

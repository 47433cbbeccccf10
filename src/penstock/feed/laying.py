"""From a window and a packing to its rows."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.feed.pieces import Packing, fit, row_long_parts, whole_documents
from penstock.feed.ragged import RaggedRows
from penstock.feed.rows import Rows
from penstock.feed.sequences import Sequences
from penstock.feed.windows import Window


def make_rows(window: Window, packing: Packing, *, length: int, pad_id: int, masked: bool = False) -> Rows:
    """A window's rows.

    Args:
        window: Its samples, in order.
        packing: How documents are laid into rows.
        length: Tokens a row; at most so many where rows are ragged.
        pad_id: Fills rows up.
        masked: Whether tokens carry a mark where they are not to be learned.
    """
    if length < 2:
        raise ConfigError(f"sequence_length={length} leaves nothing to predict: expected 2 or more")
    if packing == "concatenate":
        return Sequences(whole_documents(window), length=length, pad_id=pad_id, masked=masked)
    if packing == "ragged":
        return RaggedRows(row_long_parts(window, length, masked=masked), masked=masked)
    return Sequences(fit(window, length, pad_id, packing, masked=masked), length=length, pad_id=pad_id, masked=masked)

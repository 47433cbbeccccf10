"""Which samples were read, as a digest: the same for whoever read them, in whatever batches, and for who recomputes it.

A sample is called (config, split, row). A page's digest is over its name and its rows, a window's over its pages'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import orjson

from penstock.pages.choice import Page

_PERSON = b"penstock pages"


class PageDigest:
    """Rows of one page as they are handed out."""

    def __init__(self, page: Page) -> None:
        name = orjson.dumps([page.config_name, page.split])
        self._hash = hashlib.blake2b(name, digest_size=32, person=_PERSON)
        self.rows = 0

    def add(self, first_row: int, last_row: int) -> None:
        """Rows ``[first_row, last_row)``."""
        self._hash.update(np.arange(first_row, last_row, dtype="<i8").tobytes())
        self.rows += last_row - first_row

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def page_digest(page: Page) -> str:
    """What a page's digest has to be."""
    digest = PageDigest(page)
    digest.add(page.first_row, page.first_row + page.row_count)
    return digest.hexdigest()


def window_digest(dataset_id: str, pages: Iterable[str]) -> str:
    """The digest of several pages, by theirs."""
    told = hashlib.blake2b(dataset_id.encode(), digest_size=32, person=_PERSON)
    for digest in pages:
        told.update(bytes.fromhex(digest))
    return told.hexdigest()

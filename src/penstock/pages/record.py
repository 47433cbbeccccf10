"""What an iteration has handed out: pages, rows, and their digest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from penstock.pages.choice import Page, Window
from penstock.pages.digests import PageDigest, window_digest
from penstock.pages.tokens import PageTokens


class Record:
    """Follows an iteration. A row counts once the batch with its last token was handed out; one that was skipped, for
    having no text, counts with the row before it."""

    def __init__(self, dataset_id: str, pages: Sequence[Page], window: Window | None) -> None:
        self._dataset_id = dataset_id
        self._pages = pages
        self._window = window
        self._digests: list[str] = []
        self._current: PageDigest | None = None
        self._number = -1
        self._samples = self._skipped = self._tokens = 0

    def begin(self, number: int, tokens: PageTokens) -> None:
        """A page's tokens have arrived."""
        if len(tokens.offsets) - 1 != self._pages[number].row_count:
            raise AssertionError(f"{self._pages[number].told} has {len(tokens.offsets) - 1}")
        self._skipped += int((np.diff(tokens.offsets) == 0).sum())

    def note(self, done: Iterable[tuple[int, int]], num_tokens: int) -> None:
        """A batch was handed out; see `PageBatch.done`."""
        self._tokens += num_tokens
        for number, rows in done:
            page = self._pages[number]
            if number != self._number:
                self._close()
                self._number, self._current = number, PageDigest(page)
            assert self._current is not None
            first = page.first_row + self._current.rows
            self._samples += page.first_row + rows - first
            self._current.add(first, page.first_row + rows)

    def _close(self) -> None:
        if self._current is not None:
            self._digests.append(self._current.hexdigest())
            self._current = None

    def as_dict(self) -> dict[str, Any]:
        current = [self._current.hexdigest()] if self._current is not None and self._current.rows else []
        digests = [*self._digests, *current]
        return {
            "dataset_id": self._dataset_id,
            **({"window": asdict(self._window)} if self._window is not None else {}),
            "pages": [[*page, page.row_count] for page in self._pages],
            "samples": self._samples,
            "skipped": self._skipped,
            "tokens": self._tokens,
            "complete": self._samples == sum(page.row_count for page in self._pages),
            "page_digests": digests,
            "digest": window_digest(self._dataset_id, digests),
        }

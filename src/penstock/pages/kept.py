"""Pages' tokens that stay in memory, within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

from penstock.pages.tokens import PageTokens


class KeptPages:
    """The pages used last, by their place. Safe for threads."""

    def __init__(self, size_bytes: int) -> None:
        self._limit = size_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[int, PageTokens] = OrderedDict()
        self.size_bytes = 0

    def get(self, number: int) -> PageTokens | None:
        with self._lock:
            found = self._pages.get(number)
            if found is not None:
                self._pages.move_to_end(number)
            return found

    def put(self, number: int, tokens: PageTokens) -> None:
        with self._lock:
            if number not in self._pages:
                self._pages[number] = tokens
                self.size_bytes += _size(tokens)
            while self.size_bytes > self._limit and self._pages:
                self.size_bytes -= _size(self._pages.popitem(last=False)[1])

    def all(self) -> dict[int, PageTokens]:
        with self._lock:
            return dict(self._pages)


def _size(tokens: PageTokens) -> int:
    return tokens.ids.nbytes + tokens.offsets.nbytes

"""A page's tokens: from the token cache, or made of its texts and kept there."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import orjson

from penstock.blocks import cache_folder
from penstock.errors import ConfigError, StorageError
from penstock.feed.timings import Timings
from penstock.feed.token_store import TokenChunk, TokenStore
from penstock.pages.catalog import Catalog
from penstock.pages.choice import Page
from penstock.pages.dataset import PagedDataset
from penstock.pages.reading import PageReader, PageSource
from penstock.pages.requests import Requests
from penstock.pages.tokenizers import PageTokenizerLike
from penstock.storage import LocalStorage, ObjectInfo

_log = logging.getLogger(__name__)

OnBadRow = Literal["stop", "skip"]
Claim = Callable[[int], None]
"""Takes bytes of the budget: the first time, once there are so many; later it only says that it is another number."""
_STAMP_IDS = 8
_BATCH_CHARS = 2 << 20
"""As much text as is tokenised together: an engine may take a hundred bytes a token while it does."""
_BUSY_POLL_S = 0.01
_STORES_KEPT = 8
_VERSION = 1
_opening = threading.Lock()


def _renew() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class PageTokens(NamedTuple):
    """Tokens of a page's rows, end to end; row i is ``ids[offsets[i]:offsets[i + 1]]``. A row without tokens has no
    text; every other ends with end of text."""

    page: Page
    ids: np.ndarray
    offsets: np.ndarray


class PageTokenSource:
    """Tokens of any page of a data set. Safe for threads.

    Kept by tokenizer and page, whole texts without end: what is cut from them for one sequence length or another is cut
    anew each time, so no length can get another's. A page is kept together with a stamp of its shards' versions.
    """

    def __init__(
        self,
        dataset: PagedDataset,
        catalog: Catalog,
        reader: PageReader,
        tokenizer: PageTokenizerLike,
        *,
        on_bad_row: OnBadRow,
        batch_texts: int,
        cache_bytes: int,
        text_column: str | None,
    ) -> None:
        self._dataset = dataset
        self._catalog = catalog
        self._reader = reader
        self._tokenizer = tokenizer
        self._on_bad_row: OnBadRow = on_bad_row
        self._batch_texts = max(1, batch_texts)
        self._fingerprint = tokenizer.fingerprint
        self._cache_bytes = cache_bytes if self._fingerprint else 0
        self._stores: dict[tuple[str, int], TokenStore | None] = {}
        self._text_column = text_column
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.timings = Timings()

    def load(self, page: Page, rows_per_page: int, requests: Requests, claim: Claim) -> PageTokens:
        """A page's tokens. `claim` is told about how many bytes of memory that takes, and again where it is more."""
        part = self._catalog.part(page.config_name, page.split)
        kept = self._kept_place(page, rows_per_page)
        stamp = None
        if kept is not None:
            shards = part.pieces(page.first_row, page.first_row + page.row_count)
            with self.timings.of("fetch"):
                jobs = [lambda shard=shard: self._reader.info(shard) for shard, _, _ in shards]
                stamp = _stamp(requests.all_of(jobs))
            found = self._found(page, kept, stamp) if stamp is not None else None
            if found is not None:
                claim(found.ids.nbytes)
                return self._checked(found, requests)
        with self.timings.of("fetch"):
            source = self._reader.locate(page, part, requests)
        claim(source.size_bytes)  # before anything is locked: whoever holds a lock is at work, and waits for nobody
        if kept is None or stamp is None:
            return self._checked(self._made(page, source, requests, claim), requests)
        store, number = kept
        while True:
            with store.making(number) as mine:
                found = self._found(page, kept, stamp)
                if mine and found is None:
                    found = self._made(page, source, requests, claim)
                    self._keep(kept, found, stamp)
            if found is not None:
                return self._checked(found, requests)
            time.sleep(_BUSY_POLL_S)

    def let_go(self, page: Page, rows_per_page: int) -> None:
        """A page was used: what of the cache's files counts as this process's memory is to count no more."""
        kept = self._kept_place(page, rows_per_page)
        if kept is not None:
            kept[0].let_go(np.array([kept[1]]))

    def _made(self, page: Page, source: PageSource, requests: Requests, claim: Claim) -> PageTokens:
        with self.timings.of("fetch"):
            texts = self._reader.texts(source, requests)
        if len(texts.rows) != page.row_count:
            raise StorageError(f"got {len(texts.rows)} rows, expected {page.row_count}")
        if texts.size_bytes > source.text_bytes:  # said, not waited for: a lock may be held here
            claim(source.size_bytes + texts.size_bytes - source.text_bytes)
        with self.timings.of("tokenise"):
            return self._tokenised(page, texts.rows)

    def _tokenised(self, page: Page, texts: Sequence[str | None]) -> PageTokens:
        there = [text for text in texts if text is not None]
        ids, lengths = [np.empty(0, dtype=self.dtype)], [np.empty(0, dtype=np.int64)]
        for batch in _batches(there, self._batch_texts):
            encoded = self._tokenizer.encode(batch)
            highest = int(encoded.ids.max(initial=0))
            if highest > np.iinfo(self.dtype).max:
                raise ConfigError(
                    f"the tokenizer has given id {highest} and says that its vocab_size is "
                    f"{self._tokenizer.vocab_size}: expected one that counts all ids, added tokens too"
                )
            ids.append(encoded.ids.astype(self.dtype))
            lengths.append(np.diff(encoded.offsets))
        of_each = np.zeros(len(texts), dtype=np.int64)
        of_each[[text is not None for text in texts]] = np.concatenate(lengths)
        return PageTokens(page, np.concatenate(ids), np.concatenate([[0], np.cumsum(of_each)]))

    def _checked(self, tokens: PageTokens, requests: Requests) -> PageTokens:
        """Refuse rows without text, unless they are to be left out."""
        empty = np.flatnonzero(np.diff(tokens.offsets) == 0)
        if len(empty) and self._on_bad_row == "stop":
            part = self._catalog.part(tokens.page.config_name, tokens.page.split)
            source = self._reader.locate(tokens.page, part, requests)
            raise self._reader.refuse_textless(source, int(empty[0]))
        return tokens

    # -- the cache -----------------------------------------------------------------------------------------------------

    def _kept_place(self, page: Page, rows_per_page: int) -> tuple[TokenStore, int] | None:
        """The token cache, and a page's number in it; None where there is none, or no such page."""
        if not self._cache_bytes:
            return None
        numbering = self._catalog.numbering(page.split, rows_per_page)
        number = numbering.number_of(self._catalog.place_of(page.config_name, page.split), page.first_row)
        if number is None or numbering.rows_of(number).row_count != page.row_count:
            return None
        key = page.split, rows_per_page
        if key not in self._stores:
            self._stores[key] = self._store(*key, numbering.page_count)
        store = self._stores[key]
        return (store, number) if store is not None else None

    def _store(self, split: str, rows_per_page: int, page_count: int) -> TokenStore | None:
        wanted = {
            "version": _VERSION,
            "dataset_id": self._catalog.dataset_id,
            "tokenizer_fingerprint": self._fingerprint,
            "text_column": self._text_column,
            "split": split,
            "rows_per_page": rows_per_page,
            "dtype": self.dtype.str,
        }
        told = orjson.dumps(wanted, option=orjson.OPT_SORT_KEYS)
        folder = cache_folder().expanduser().absolute() / "tokens" / f"pages-{hashlib.sha256(told).hexdigest()[:32]}"
        key = os.getpid(), folder, self._cache_bytes  # locks do not come along when forked
        with _opening:
            stores = self._dataset.token_stores
            found = stores.pop(key) if key in stores else self._opened(folder, told, page_count)
            stores[key] = found
            while len(stores) > _STORES_KEPT:
                del stores[next(iter(stores))]  # which closes its files once nobody uses it
            return found

    def _opened(self, folder: Path, told: bytes, page_count: int) -> TokenStore | None:
        try:
            storage = LocalStorage(folder)
            if not storage.exists("header.json"):
                storage.put("header.json", told)
            elif storage.get("header.json") != told:
                raise ConfigError(f"{folder} is the token cache of other pages: delete it")
            return TokenStore(folder, chunk_count=page_count, dtype=self.dtype, max_bytes=self._cache_bytes)
        except (OSError, StorageError) as error:
            _log.warning("no token cache: %s; every page is tokenised anew each time", error)
            return None

    def _found(self, page: Page, kept: tuple[TokenStore, int], stamp: np.ndarray) -> PageTokens | None:
        store, number = kept
        chunk = store.get(number)
        if chunk is None or len(chunk.offsets) != page.row_count + 2:
            return None
        end = int(chunk.offsets[-2])
        if not np.array_equal(chunk.ids[end:], stamp):
            return None  # of shards as they were before
        return PageTokens(page, chunk.ids[:end], chunk.offsets[:-1])

    def _keep(self, kept: tuple[TokenStore, int], tokens: PageTokens, stamp: np.ndarray) -> None:
        store, number = kept
        ids = np.concatenate([tokens.ids, stamp.astype(self.dtype)])
        try:
            store.put(number, TokenChunk(ids, np.append(tokens.offsets, len(ids))))
        except OSError as error:
            _log.warning("%s: tokens are not kept: %s", store.folder, error.strerror or error)
            self._cache_bytes = 0


def _batches(texts: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Texts to be tokenised together: `count`, or fewer where they are long."""
    first, chars = 0, 0
    for place, text in enumerate(texts):
        if place > first and (place - first >= count or chars + len(text) > _BATCH_CHARS):
            yield texts[first:place]
            first, chars = place, 0
        chars += len(text)
    if first < len(texts):
        yield texts[first:]


def _stamp(infos: Sequence[ObjectInfo]) -> np.ndarray | None:
    """What tells these very versions of shards from others, as ids; None where nothing tells them."""
    told = []
    for info in infos:
        version = info.version or info.modified
        if version is None:
            return None
        told.append(f"{info.key}\n{version}\n{info.size_bytes}\n")
    return np.frombuffer(hashlib.sha256("".join(told).encode()).digest()[: 2 * _STAMP_IDS], dtype="<u2")

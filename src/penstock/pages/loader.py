"""R2DatasetLoader: pages of a Parquet data set, chosen by seed and window, as arrays of token ids."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.pages.batches import BatchFiller, Laid, PageBatch
from penstock.pages.catalog import split_name
from penstock.pages.choice import ROWS_PER_PAGE, Pages, Window, choose, seed_text
from penstock.pages.dataset import PagedDataset
from penstock.pages.forking import renew_in_forks
from penstock.pages.kept import KeptPages
from penstock.pages.opened import Limits, OpenedPages
from penstock.pages.places import DatasetLike, open_dataset
from penstock.pages.record import Record
from penstock.pages.tokens import OnBadRow, PageTokens


class R2DatasetLoader:
    """Batches of the pages that (seed, window) determines, read where they lie.

        pages = R2DatasetLoader.next_pages(offset=window * 6, n_pages=6, seed=uid)
        loader = R2DatasetLoader.create(8, 2048, pages, tokenizer)
        for batch in loader:                # (8, 2048) int64, all of them
            loader.mask                     # where `batch` is text; packed, everywhere but at the very end

    Both may be awaited as well. The data set is that of the environment's buckets (`penstock.load_bucket_secrets`),
    below `DATASET_SUBFOLDER`; or `dataset`, a URL, a folder or a store. The first batch is there once its pages are;
    while it is used, up to `PREFETCH_SIZE` pages more are loaded, by up to `MAX_CONCURRENT_REQUESTS` requests at a
    time, within `PREFETCH_BYTES`. A page that cannot be read is an error that names it.

    Each iteration begins with the first page. Leaving one early ends its threads. As a map-style data set, item k is
    batch k: for a torch DataLoader with ``batch_size=None`` and any number of workers, which are to be spawned; its
    length is known once every page was tokenised, which `len` does. Pickles; constructing does no I/O.
    """

    MAX_CONCURRENT_REQUESTS: int = 8
    PREFETCH_SIZE: int = 3
    """Pages loaded behind the one that is used."""
    READ_BUFFER_SIZE: int = 4 * 1024 * 1024
    """The largest range of texts that is asked for at a time."""
    BATCH_SIZE: int = 128
    """Texts tokenised together."""
    CF_REGION_NAME: str = "enam"
    DATASET_SUBFOLDER: str = "HuggingFaceFW_fineweb-edu-score-2"
    PREFETCH_BYTES: int = 256 << 20
    """How much memory pages may take; one page alone may take more."""
    TOKEN_CACHE_BYTES: int = 8 << 30
    """How much disk the tokens of pages may take, a data set and tokenizer; 0 keeps none."""

    @classmethod
    def next_pages(
        cls,
        offset: int,
        n_pages: int,
        seed: int | str,
        num_rows_per_page: int = ROWS_PER_PAGE,
        *,
        split: str = "train",
        dataset: DatasetLike | None = None,
    ) -> Pages:
        """The pages that anyone with this seed has to read at this offset: a list of (config_name, first_row, split).

        A function of the data set's index, the split, the seed, the page size and the offset, on every machine. All
        pages of a window are different, and configs are drawn by their rows. Positions go round behind the last page.

        Args:
            offset: The first page's position in the seed's order: windows of n pages begin at multiples of n.
            n_pages: How many.
            seed: A number or a text; 7 and "7" are the same.
            num_rows_per_page: Rows of a page; the last of a config may have fewer.
            split: train, valid or test.
            dataset: Where it is, if not in the environment's bucket.
        """
        opened = cls._open_dataset(dataset)
        window = Window(
            seed=seed_text(seed),
            offset=_index(offset, "offset"),
            n_pages=_index(n_pages, "n_pages"),
            split=split_name(split),
            num_rows_per_page=_index(num_rows_per_page, "num_rows_per_page"),
        )
        return Pages(choose(opened.catalog(fresh=True), window), window=window, dataset=opened)

    @classmethod
    async def next_pages_async(cls, *args: Any, **more: Any) -> Pages:
        """`next_pages` without holding up the event loop while the index is fetched."""
        return await asyncio.to_thread(cls.next_pages, *args, **more)

    @classmethod
    def create(
        cls,
        batch_size: int,
        sequence_length: int,
        pages_info: Sequence[Any],
        tokenizer: Any,
        pack_samples: bool = True,
        **more: Any,
    ) -> R2DatasetLoader:
        """A loader over pages, those of `next_pages` or any list of (config_name, first_row, split).

        Does no I/O yet. For the other arguments see `__init__`.
        """
        return cls(batch_size, sequence_length, tokenizer, pack_samples, pages_info=pages_info, **more)

    def __init__(
        self,
        batch_size: int,
        sequence_length: int,
        tokenizer: Any,
        pack_samples: bool = True,
        *,
        pages_info: Sequence[Any],
        dataset: DatasetLike | None = None,
        num_rows_per_page: int | None = None,
        text_column: str | None = None,
        on_bad_row: OnBadRow = "stop",
        pad_id: int | None = None,
    ) -> None:
        """Remember what to load.

        Args:
            batch_size: Rows of a batch.
            sequence_length: Tokens of a row.
            tokenizer: What `DistributedLoader` takes, or a tokenizer object; see `as_tokenizer`.
            pack_samples: Documents end to end, each closed by end of text, cut into rows; else each begins a row and
                is filled up. Long ones go on in the next row in either case.
            pages_info: The pages.
            dataset: Where they are, if `pages_info` does not know and it is not the environment's bucket.
            num_rows_per_page: Rows of the pages, where they were made by hand or came through JSON; else 100.
            text_column: The column with the texts, ``a.b`` for one inside another; else found by its name.
            on_bad_row: What to do with a row without text: ``stop``, or ``skip`` it, its neighbours keep their ids.
            pad_id: What fills up rows; else end of text. `lengths` and `mask` tell it from text in any case.
        """
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if _index(value, name) < 1:
                raise ConfigError(f"{name}={value} holds nothing: expected 1 or more")
        if on_bad_row not in ("stop", "skip"):
            raise ConfigError(f"on_bad_row={on_bad_row!r} is unknown: expected 'stop' or 'skip'")
        if pad_id is not None and not -(1 << 63) <= _index(pad_id, "pad_id") < 1 << 63:
            raise ConfigError(f"pad_id={pad_id} does not fit in a batch: expected a 64-bit number")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.tokenizer = tokenizer
        self.pack_samples = pack_samples
        self.pages: Sequence[Any] = pages_info
        self._window: Window | None = None
        self._dataset = dataset
        if isinstance(pages_info, Pages):
            self._window = pages_info.window
            self._dataset = dataset if dataset is not None else pages_info.dataset
        self._num_rows_per_page = None if num_rows_per_page is None else _index(num_rows_per_page, "num_rows_per_page")
        self._text_column = text_column
        self._on_bad_row: OnBadRow = on_bad_row
        self._pad_id = pad_id
        self._counts: np.ndarray | None = None
        """Places (tokens, or rows) of the pages up to each one's end; known once all were tokenised."""
        self._settle()

    def _settle(self) -> None:
        self.renew()
        renew_in_forks(self)
        self._record: Record | None = None
        self._last: PageBatch | None = None
        self._own: Generator[np.ndarray, None, None] | None = None

    def renew(self) -> None:
        """A lock, and what it guards; see `forking`."""
        self._lock = threading.Lock()
        self._opened: OpenedPages | None = None
        self._kept = KeptPages(self.PREFETCH_BYTES // 2)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in _UNSHARED}
        return {**kept, "pages": list(self.pages)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._settle()

    def __await__(self) -> Generator[Any, None, R2DatasetLoader]:
        return self
        yield

    # -- iterating -----------------------------------------------------------------------------------------------------

    def batches(self) -> Generator[PageBatch, None, None]:
        """Batches with what is known of each: how much of its rows is text."""
        opened = self._open()
        record = self._record = Record(opened.catalog.dataset_id, opened.pages, self._window)
        filler = self._filler(opened)
        with closing(opened.all(self._kept)) as pages:
            for batch in filler.batches(self._told(pages, record)):
                record.note(batch.done, batch.num_tokens)
                opened.source.timings.batches += 1
                self._last = batch
                yield batch
        record.note(filler.left, 0)

    def __iter__(self) -> Generator[np.ndarray, None, None]:
        for batch in self.batches():
            yield batch.input_ids

    def __next__(self) -> np.ndarray:
        """The next batch of an iteration of the loader's own."""
        if self._own is None:
            self._own = iter(self)
        try:
            return next(self._own)
        except StopIteration:
            self._own = None
            raise

    async def __aiter__(self) -> AsyncIterator[np.ndarray]:
        batches = iter(self)
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch
        finally:
            with suppress(ValueError):  # cancelled while a thread is at it: it ends when nobody refers to it any more
                batches.close()

    def close(self) -> None:
        """End the iteration that `next` began, if there is one."""
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def __enter__(self) -> R2DatasetLoader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens of each row of the batch handed out last are text."""
        return self._handed_out().lengths

    @property
    def mask(self) -> np.ndarray:
        """Where the batch handed out last is text, and not filling."""
        return self._handed_out().mask

    def report(self) -> dict[str, Any]:
        """What the last iteration has handed out so far: JSON, for `penstock pages verify`."""
        if self._record is None:
            raise ConfigError("nothing was iterated yet, so there is nothing to report: iterate first")
        return self._record.as_dict()

    def timings(self) -> dict[str, float]:
        """Where the time went: waits of whoever iterates, fetching, tokenising."""
        return self._open().source.timings.report()

    # -- by number -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches; tokenises every page where that was not done yet."""
        total = int(self._places()[-1]) if len(self.pages) else 0
        return (total + self._room - 1) // self._room

    def __getitem__(self, k: int) -> np.ndarray:
        """Batch k, as iterating gives it."""
        count = len(self)
        k = k + count if k < 0 else k
        if not 0 <= k < count:
            raise IndexError(f"batch {k} of {count}")
        opened, ends = self._open(), self._places()
        filler = self._filler(opened)
        at, stop = k * self._room, min((k + 1) * self._room, int(ends[-1]))
        while at < stop:
            number = int(np.searchsorted(ends, at, side="right"))
            before = int(ends[number - 1]) if number else 0
            laid = Laid(self._page(opened, number), self.sequence_length, packed=self.pack_samples)
            until = min(stop, int(ends[number]))
            filler.put(laid, at - before, until - before)
            at = until
        return filler.finish().input_ids

    @property
    def _room(self) -> int:
        return self.batch_size * self.sequence_length if self.pack_samples else self.batch_size

    def _places(self) -> np.ndarray:
        if self._counts is None:
            opened = self._open()
            counts = []
            with closing(opened.all(self._kept)) as pages:
                for number, tokens in enumerate(pages):
                    counts.append(Laid(tokens, self.sequence_length, packed=self.pack_samples).count)
                    self._kept.put(number, tokens)
            self._counts = np.cumsum(counts, dtype=np.int64)
        return self._counts

    def _page(self, opened: OpenedPages, number: int) -> PageTokens:
        found = self._kept.get(number)
        if found is None:
            found = opened.one(number)
            self._kept.put(number, found)
        return found

    # -- opening -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> PagedDataset:
        return self._open_dataset(self._dataset)

    @classmethod
    def _open_dataset(cls, dataset: DatasetLike | None) -> PagedDataset:
        return open_dataset(dataset, subfolder=cls.DATASET_SUBFOLDER, region=cls.CF_REGION_NAME)

    def _open(self) -> OpenedPages:
        with self._lock:
            if self._opened is None or self._opened.pid != os.getpid():  # locks of files do not come along when forked
                self._dataset = self.dataset
                self._opened = OpenedPages(
                    self._dataset,
                    self.pages,
                    self.tokenizer,
                    Limits(
                        max_requests=self.MAX_CONCURRENT_REQUESTS,
                        ahead=self.PREFETCH_SIZE,
                        budget_bytes=self.PREFETCH_BYTES,
                        buffer_bytes=self.READ_BUFFER_SIZE,
                        batch_texts=self.BATCH_SIZE,
                        cache_bytes=self.TOKEN_CACHE_BYTES,
                    ),
                    rows_given=self._num_rows_per_page,
                    rows_known=self._window.num_rows_per_page if self._window is not None else None,
                    text_column=self._text_column,
                    on_bad_row=self._on_bad_row,
                )
                self.tokenizer = self._opened.tokenizer
            return self._opened

    def _filler(self, opened: OpenedPages) -> BatchFiller:
        pad_id = opened.tokenizer.end_of_text_id if self._pad_id is None else self._pad_id
        return BatchFiller(self.batch_size, self.sequence_length, pad_id, packed=self.pack_samples)

    def _told(self, pages: Iterator[PageTokens], record: Record) -> Iterator[PageTokens]:
        for number, tokens in enumerate(pages):
            record.begin(number, tokens)
            yield tokens

    def _handed_out(self) -> PageBatch:
        if self._last is None:
            raise ConfigError("no batch was handed out yet: iterate first")
        return self._last


_UNSHARED = ("_lock", "_opened", "_kept", "_record", "_last", "_own")


def _index(value: Any, name: str) -> int:
    """A whole number, whatever kind of one it is."""
    with suppress(AttributeError, TypeError):
        if not isinstance(value, bool):
            return value.__index__()
    raise ConfigError(f"{name}={value!r} is no whole number")

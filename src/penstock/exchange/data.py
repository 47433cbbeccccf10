"""What a worker learns in a window: its pages, by (uid, window), as packed batches; the next ones while it learns."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.exchange.settings import RunFacts
from penstock.feed import Batch
from penstock.feed.packing import pack_window
from penstock.feed.tokenizer import Tokenizer
from penstock.pages import PagedDataset, R2DatasetLoader, verify_window
from penstock.pages.choice import Window
from penstock.pages.places import open_dataset
from penstock.plans.permutation import derive_key


@dataclass(frozen=True, slots=True)
class WindowBatches:
    """The batches of one worker's window, and what they prove."""

    batches: list[Batch]
    samples_digest: str
    """Of the sample ids that were read."""

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)


class WindowData:
    """Pages of a run's data set as batches. Loads ahead in a thread of its own; closing ends it."""

    def __init__(self, facts: RunFacts, dataset: Any, tokenizer: Tokenizer) -> None:
        self._facts = facts
        self._settings = facts.settings
        self._tokenizer = tokenizer
        self._dataset: PagedDataset = open_dataset(
            dataset, subfolder=self._settings.dataset_subfolder, region=R2DatasetLoader.CF_REGION_NAME
        )
        self._ahead: dict[tuple[str, int], Future[WindowBatches]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pages-ahead")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Refuse another data set than the run's."""
        found = self._dataset.catalog().dataset_id
        if found != self._facts.dataset_id:
            raise ConfigError(
                f"{self._dataset.where} is another data set than the run's: its id is {found[:16]}..., expected "
                f"{self._facts.dataset_id[:16]}..."
            )

    def window_of(self, seed: str, window: int, n_pages: int | None = None) -> Window:
        count = n_pages or self._settings.n_pages
        return Window(
            seed=seed,
            offset=window * count,
            n_pages=count,
            split=self._settings.split,
            num_rows_per_page=self._settings.num_rows_per_page,
        )

    def assigned(self, uid: str, window: int) -> WindowBatches:
        """What a worker has to read in a window; at once where it was fetched ahead."""
        ahead = self._ahead.pop((uid, window), None)
        for late in self._ahead.values():
            late.cancel()
        self._ahead.clear()
        return ahead.result() if ahead is not None else self._load(self.window_of(self.seed(uid), window))

    def fetch_ahead(self, uid: str, window: int) -> None:
        """Begin to read a window while another is learned."""
        task = self._pool.submit(lambda: self._load(self.window_of(self.seed(uid), window)))
        self._ahead[uid, window] = task

    def random(self, secret: str, window: int) -> WindowBatches:
        """Pages that nobody can know before they are used."""
        seed = derive_key("exchange random", self._settings.run, secret, window).hex()[:32]
        return self._load(self.window_of(seed, 0, self._settings.random_pages))

    def expected_digest(self, uid: str, window: int) -> str:
        """The digest of the sample ids that a worker has to read, by the index alone."""
        return verify_window(self._dataset.catalog(), self.window_of(self.seed(uid), window)).digest

    def seed(self, uid: str) -> str:
        """What a worker's pages are drawn by: nobody shares another's order."""
        return f"{self._settings.run}/{uid}"

    def _load(self, window: Window) -> WindowBatches:
        s = self._settings
        pages = R2DatasetLoader.next_pages(
            window.offset,
            window.n_pages,
            window.seed,
            window.num_rows_per_page,
            split=window.split,
            dataset=self._dataset,
        )
        loader = R2DatasetLoader.create(
            s.batch_size, s.sequence_length, pages, self._tokenizer, text_column=s.text_column or None
        )
        end = self._tokenizer.end_of_text_id
        texts = [batch.input_ids[batch.mask] for batch in loader.batches()]
        ids = np.concatenate(texts) if texts else np.empty(0, np.int64)
        offsets = np.concatenate([[0], np.flatnonzero(ids == end) + 1])
        packed = pack_window(ids, offsets, first_sample_id=0, sequence_length=s.sequence_length, pad_id=end)
        return WindowBatches(list(packed.batches(s.batch_size)), loader.report()["digest"])

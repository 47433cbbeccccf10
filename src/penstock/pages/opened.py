"""Pages that are ready to be loaded: checked against the catalog, with a tokenizer, a reader and a token cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from penstock.errors import SourceError
from penstock.pages.catalog import Catalog
from penstock.pages.choice import ROWS_PER_PAGE, Page, check_pages
from penstock.pages.dataset import PagedDataset
from penstock.pages.kept import KeptPages
from penstock.pages.pipeline import PagePipeline, load_page, refuse_forked
from penstock.pages.reading import PageReader
from penstock.pages.requests import Requests
from penstock.pages.tokenizers import PageTokenizerLike, as_tokenizer
from penstock.pages.tokens import Claim, OnBadRow, PageTokens, PageTokenSource

_log = logging.getLogger(__name__)

_COMPARED_PARTS = 8
_COMPARED_TEXTS = 100
_COMPARED_CHARS = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is done and held at a time."""

    max_requests: int
    ahead: int
    """Pages loaded behind the one that is used."""
    budget_bytes: int
    buffer_bytes: int
    batch_texts: int
    cache_bytes: int


class OpenedPages:
    """The pages of a loader, in this process. Opening looks at the index, and reads a few texts where engines are yet
    to be compared; nothing else is read before it is asked for."""

    def __init__(
        self,
        dataset: PagedDataset,
        pages: Sequence[Any],
        tokenizer: Any,
        limits: Limits,
        *,
        rows_given: int | None,
        rows_known: int | None,
        text_column: str | None,
        on_bad_row: OnBadRow,
    ) -> None:
        """Check the pages, and make what loads them.

        Args:
            dataset: Where they are.
            pages: As they were handed in.
            tokenizer: As it was handed in.
            limits: How much to do at a time.
            rows_given: Rows a page, where whoever made the loader says so.
            rows_known: Rows a page, where the pages know.
            text_column: The column with the texts; else found by its name.
            on_bad_row: What to do with a row without text.
        """
        self.pid = os.getpid()
        self.limits = limits
        self.catalog = dataset.catalog()
        self.pages = check_pages(pages, self.catalog, rows_given)
        longest = max((page.row_count for page in self.pages), default=ROWS_PER_PAGE)
        self._rows_per_page = rows_given or rows_known or longest
        reader = PageReader(dataset, text_column=text_column, buffer_bytes=limits.buffer_bytes)
        self.tokenizer = self._made_tokenizer(tokenizer, reader)
        self.source = PageTokenSource(
            dataset,
            self.catalog,
            reader,
            self.tokenizer,
            on_bad_row=on_bad_row,
            batch_texts=limits.batch_texts,
            cache_bytes=limits.cache_bytes,
            text_column=text_column,
        )

    def all(self, kept: KeptPages) -> Generator[PageTokens, None, None]:
        """The pages' tokens in order: those in `kept`, and the others loaded ahead."""
        at_hand = kept.all()
        pipeline = PagePipeline(
            [page for number, page in enumerate(self.pages) if number not in at_hand],
            self._load,
            ahead=self.limits.ahead,
            max_requests=self.limits.max_requests,
            budget_bytes=max(1, self.limits.budget_bytes - kept.size_bytes),
            on_wait=self.source.timings.waited,
        )
        with closing(iter(pipeline)) as loaded:
            for number, page in enumerate(self.pages):
                if number in at_hand:
                    yield at_hand[number]
                else:
                    yield next(loaded)
                    refuse_forked(self.pid)
                    self.source.let_go(page, self._rows_per_page)

    def one(self, number: int) -> PageTokens:
        """One page's tokens, loaded here and now."""
        with Requests(self.limits.max_requests) as requests:
            return load_page(self.pages[number], self._load, requests, lambda _: None)

    def _load(self, page: Page, requests: Requests, claim: Claim) -> PageTokens:
        return self.source.load(page, self._rows_per_page, requests, claim)

    def _made_tokenizer(self, given: Any, reader: PageReader) -> PageTokenizerLike:
        catalog: Catalog = self.catalog

        def first_texts() -> list[str]:
            """The same for everybody, so that everybody chooses the same engine: of the first part that is sound,
            whichever pages are asked for. A store that does not answer is no reason to take another."""
            problem: SourceError | None = None
            for part in [part for part in catalog.parts if part.num_rows][:_COMPARED_PARTS]:
                page = Page.of(part.config, 0, part.split, min(_COMPARED_TEXTS, part.num_rows))
                try:
                    with Requests(self.limits.max_requests) as requests:
                        texts = reader.texts(reader.locate(page, part, requests), requests).rows
                    return [text[:_COMPARED_CHARS] for text in texts if text is not None]
                except SourceError as error:
                    _log.warning("%s is not taken to compare tokenizer engines by: %s", page.told, error)
                    problem = problem or error
            raise SourceError(f"no texts could be read to compare tokenizer engines by: {problem}") from problem

        return as_tokenizer(given, first_texts, catalog.dataset_id)

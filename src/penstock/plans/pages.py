"""The pages plan: (seed, window) determines which rows anyone has to read, and anyone can work it out again.

    rows of each part (a config of a data set) ──► pages of `rows_per_page` consecutive rows, the last of a part shorter
    page numbers 0..P-1, part after part ──► a permutation keyed by data set, split, page size and seed
    window = positions [offset, offset + n) of that order, going round behind its end

Every row is in one page, and every page is as likely as any other to stand anywhere: so parts are drawn by their rows.
The order of a seed is the same in each round: any P positions running hold every page once, wherever they begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.plans.permutation import Permutation, derive_key

_MOST_ROWS = 1 << 53


@dataclass(frozen=True, slots=True)
class PageRows:
    """The rows of one page: ``[first_row, first_row + row_count)`` of a part."""

    part: int
    first_row: int
    row_count: int


class PageNumbering:
    """Pages of several parts, numbered part after part. Pure; safe for threads; pickles."""

    def __init__(self, part_rows: Sequence[int], rows_per_page: int) -> None:
        """Cut parts into pages.

        Args:
            part_rows: How many rows each part has.
            rows_per_page: Rows of a page; the last page of a part has what is left.
        """
        if rows_per_page < 1:
            raise ConfigError(f"num_rows_per_page={rows_per_page} holds no row: expected 1 or more")
        if rows_per_page > _MOST_ROWS:
            raise ConfigError(f"num_rows_per_page={rows_per_page} is more than can be counted: expected 2**53 or fewer")
        self.rows_per_page = rows_per_page
        self._rows = np.array(part_rows, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(-(-self._rows // rows_per_page))])
        """The number of each part's first page, and how many pages there are."""

    @property
    def page_count(self) -> int:
        return int(self._starts[-1])

    def rows_of(self, number: int) -> PageRows:
        """The rows of a page by its number."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        first = (number - int(self._starts[part])) * self.rows_per_page
        return PageRows(part, first, min(self.rows_per_page, int(self._rows[part]) - first))

    def number_of(self, part: int, first_row: int) -> int | None:
        """The number of the page that begins at a row; None where none begins there."""
        if first_row % self.rows_per_page or not 0 <= first_row < self._rows[part]:
            return None
        return int(self._starts[part]) + first_row // self.rows_per_page


class PagePlan:
    """The order in which a seed goes through the pages of a data set. Pure; safe for threads; pickles."""

    def __init__(self, numbering: PageNumbering, *key: int | str) -> None:
        """Fix the order.

        Args:
            numbering: The pages.
            key: All that the order depends on: the data set, the split, the seed.
        """
        self.numbering = numbering
        self._order = Permutation(numbering.page_count, derive_key("pages", numbering.rows_per_page, *key))

    def window(self, offset: int, page_count: int) -> list[PageRows]:
        """The pages at positions ``[offset, offset + page_count)``, all of them different."""
        total = self.numbering.page_count
        if offset < 0 or page_count < 0:
            raise ConfigError(f"offset={offset}, n_pages={page_count} are no window: expected 0 or more of both")
        if page_count > total:
            raise ConfigError(
                f"n_pages={page_count} is more than the {total} pages of {self.numbering.rows_per_page} rows that "
                "there are, and none comes twice in a window: ask for fewer pages, or for fewer rows a page"
            )
        if not page_count:
            return []
        places = np.arange(offset % total, offset % total + page_count, dtype=np.int64) % total
        return [self.numbering.rows_of(number) for number in self._order.at(places).tolist()]

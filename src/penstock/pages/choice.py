"""Pages as they are chosen and handed about: tuples of config, first row and split, in a list that knows its choice."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

from penstock.errors import ConfigError
from penstock.plans.pages import PagePlan

if TYPE_CHECKING:
    from penstock.pages.catalog import Catalog
    from penstock.pages.dataset import PagedDataset

ROWS_PER_PAGE = 100


class _Page(NamedTuple):
    config_name: str
    first_row: int
    split: str


class Page(_Page):
    """``(config_name, first_row, split)``: a tuple like any other, which remembers how many rows it has."""

    row_count: int

    @classmethod
    def of(cls, config_name: str, first_row: int, split: str, row_count: int) -> Page:
        page = cls(config_name, first_row, split)
        page.row_count = row_count
        return page

    @property
    def told(self) -> str:
        """For messages."""
        return f"page ({self.config_name!r}, {self.first_row}, {self.split!r}) of {self.row_count} rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """All that determines a choice of pages."""

    seed: str
    offset: int
    n_pages: int
    split: str
    num_rows_per_page: int


class Pages(list[Page]):
    """The pages of a window. A list; awaiting it gives it back, for code that awaits `next_pages`."""

    def __init__(self, pages: Iterable[Page], *, window: Window, dataset: PagedDataset) -> None:
        super().__init__(pages)
        self.window = window
        self.dataset = dataset

    def __await__(self) -> Generator[Any, None, Pages]:
        return self
        yield

    def copy(self) -> Pages:
        return Pages(self, window=self.window, dataset=self.dataset)

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> Page: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[Page]: ...
    def __getitem__(self, key: Any, /) -> Page | list[Page]:
        """Some of a window's pages are a plain list, which knows no window."""
        return super().__getitem__(key)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        return _rebuild, (list(self), self.window, self.dataset)


def _rebuild(pages: list[Page], window: Window, dataset: PagedDataset) -> Pages:
    return Pages(pages, window=window, dataset=dataset)


def choose(catalog: Catalog, window: Window) -> list[Page]:
    """The pages that anyone with this data set, seed and window gets."""
    parts = catalog.parts_of(window.split)
    numbering = catalog.numbering(window.split, window.num_rows_per_page)
    plan = PagePlan(numbering, catalog.dataset_id, window.split, window.seed)
    return [
        Page.of(parts[rows.part].config, rows.first_row, window.split, rows.row_count)
        for rows in plan.window(window.offset, window.n_pages)
    ]


def seed_text(seed: object) -> str:
    """A seed as the text it is told by: 7 and "7" are the same seed, in every process and on every machine."""
    if isinstance(seed, str):
        try:
            seed.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"seed={seed!r} is no text that can be written down: expected one") from None
        return seed
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise ConfigError(f"seed={seed!r} is no seed: expected a number or a text")
    return str(seed.__index__())


def check_pages(pages: Sequence[Any], catalog: Catalog, num_rows_per_page: int | None) -> list[Page]:
    """Pages as somebody hands them in, with their numbers of rows; what is no page of this data set is refused."""
    if num_rows_per_page is not None and num_rows_per_page < 1:
        raise ConfigError(f"num_rows_per_page={num_rows_per_page} holds no row: expected 1 or more")
    return [_checked(entry, place, catalog, num_rows_per_page) for place, entry in enumerate(pages)]


def _checked(entry: Any, place: int, catalog: Catalog, num_rows_per_page: int | None) -> Page:
    try:
        config, first_row, split = entry
        first_row = first_row.__index__()
        if not isinstance(config, str) or not isinstance(split, str):
            raise TypeError
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"pages_info[{place}] is {entry!r}: expected (config_name, first_row, split), as next_pages gives"
        ) from None
    part = catalog.part(config, split)
    if not 0 <= first_row < part.num_rows:
        raise ConfigError(
            f"pages_info[{place}] begins at row {first_row} of {config!r}, split {split!r}, which has {part.num_rows}: "
            "take pages that next_pages gave for this data set"
        )
    known = entry.row_count if isinstance(entry, Page) else None
    row_count = min(num_rows_per_page or known or ROWS_PER_PAGE, part.num_rows - first_row)
    if known is not None and known != row_count:
        raise ConfigError(
            f"pages_info[{place}] has {known} rows, and num_rows_per_page={num_rows_per_page} makes it {row_count}: "
            "leave num_rows_per_page out for pages that next_pages gave"
        )
    return Page.of(config, first_row, part.split, row_count)

"""Working out again what a window had to read, and comparing it with what somebody says to have read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.pages.catalog import Catalog, split_name
from penstock.pages.choice import ROWS_PER_PAGE, Page, Window, choose, seed_text
from penstock.pages.digests import page_digest, window_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What had to be read, and what is wrong with what was."""

    window: Window
    dataset_id: str
    pages: list[Page]
    page_digests: list[str]
    digest: str
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "dataset_id": self.dataset_id,
            "window": asdict(self.window),
            "pages": [[*page, page.row_count] for page in self.pages],
            "samples": sum(page.row_count for page in self.pages),
            "page_digests": self.page_digests,
            "digest": self.digest,
            "holds": not self.problems,
            "problems": self.problems,
        }


def verify_window(catalog: Catalog, window: Window, told: dict[str, Any] | str | None = None) -> Verdict:
    """Work out a window by the index alone, and compare.

    Args:
        catalog: The data set's.
        window: The seed and the window.
        told: What somebody reports: all of `R2DatasetLoader.report`, or the digest alone; None compares nothing.
    """
    pages = choose(catalog, window)
    digests = [page_digest(page) for page in pages]
    digest = window_digest(catalog.dataset_id, digests)
    problems: list[str] = []
    if isinstance(told, str):
        if told != digest:
            problems.append(f"digest: got {told}, expected {digest}")
    elif told is not None:
        problems = _differences(told, catalog, window, pages, digests, digest)
    if told is not None and not pages:
        problems.append("the window has no pages, so there is nothing that could have been read")
    return Verdict(
        window=window,
        dataset_id=catalog.dataset_id,
        pages=pages,
        page_digests=digests,
        digest=digest,
        problems=problems,
    )


def window_of(report: dict[str, Any], **given: Any) -> Window:
    """The window that a report tells of; what is given, and not None, goes before what the report says."""
    given = {name: value for name, value in given.items() if value is not None}
    found = report.get("window")
    if found is None and given.keys() >= {"seed", "offset", "n_pages"}:
        found = {"split": "train", "num_rows_per_page": ROWS_PER_PAGE}
    try:
        window = Window(**{**found, **given})  # pyright: ignore - whatever is missing or too much is told
    except TypeError:
        raise ConfigError(
            "the report tells of no window: expected what R2DatasetLoader.report() gives for pages of next_pages; or "
            "give --seed, --offset, --n-pages and --rows-per-page"
        ) from None
    counts = (window.offset, window.n_pages, window.num_rows_per_page)
    names = (window.seed, window.split)
    if not all(type(count) is int for count in counts) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"the report's window is {found!r}: expected numbers, and a seed and a split as text")
    return replace(window, seed=seed_text(window.seed), split=split_name(window.split))


def _differences(
    told: dict[str, Any], catalog: Catalog, window: Window, pages: list[Page], digests: list[str], digest: str
) -> list[str]:
    """All that a report says and the index tells: a report that contradicts itself does not hold."""
    problems = []
    if told.get("window") not in (None, asdict(window)):
        problems.append(f"window: got {told['window']!r}, expected {asdict(window)!r}")
    if told.get("dataset_id") != catalog.dataset_id:
        problems.append(f"dataset_id: got {told.get('dataset_id')!r}, expected {catalog.dataset_id!r}")
    got = told.get("page_digests")
    got = got if isinstance(got, list) else []
    for number, page in enumerate(pages):
        if number >= len(got):
            problems.append(f"{page.told}, number {number} of the window, was not read")
        elif got[number] != digests[number]:
            problems.append(f"{page.told}, number {number} of the window, was not read as it is: other samples")
    if len(got) > len(pages):
        problems.append(f"{len(got) - len(pages)} pages more than the window has were read")
    if told.get("pages") != [[*page, page.row_count] for page in pages]:
        problems.append("pages: those that are named are not those of the window")
    samples = sum(page.row_count for page in pages)
    if told.get("samples") != samples:
        problems.append(f"samples: got {told.get('samples')!r}, expected {samples}")
    if told.get("complete") is not True:
        problems.append(f"complete: got {told.get('complete')!r}, expected True")
    if told.get("digest") != digest and not problems:
        problems.append(f"digest: got {told.get('digest')!r}, expected {digest}")
    return problems

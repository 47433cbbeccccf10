"""Which pages a seed reads: every row in one page, every page once before any comes again, parts by their rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plans.pages import PageNumbering, PagePlan

parts = st.lists(st.integers(0, 300), min_size=1, max_size=6)
page_sizes = st.integers(1, 120)


def plan_of(rows: list[int], rows_per_page: int, seed: str = "seed") -> PagePlan:
    return PagePlan(PageNumbering(rows, rows_per_page), "data set", "train", seed)


@given(rows=parts, rows_per_page=page_sizes, seed=st.text(max_size=8))
def test_each_row_is_in_exactly_one_page(rows: list[int], rows_per_page: int, seed: str) -> None:
    plan = plan_of(rows, rows_per_page, seed)
    pages = plan.window(0, plan.numbering.page_count)
    read = [(page.part, page.first_row + place) for page in pages for place in range(page.row_count)]
    assert sorted(read) == [(part, row) for part, count in enumerate(rows) for row in range(count)]
    assert all(1 <= page.row_count <= rows_per_page for page in pages)
    assert all(page.first_row % rows_per_page == 0 for page in pages)


@given(rows=parts, rows_per_page=page_sizes, offset=st.integers(0, 2**62), data=st.data())
def test_pages_of_a_window_are_distinct_wherever_it_begins(
    rows: list[int], rows_per_page: int, offset: int, data: st.DataObject
) -> None:
    plan = plan_of(rows, rows_per_page)
    count = data.draw(st.integers(0, plan.numbering.page_count))
    pages = plan.window(offset, count)
    assert len(set(pages)) == count


@given(rows=parts.filter(lambda rows: sum(rows) > 0), rows_per_page=page_sizes, cut=st.integers(0, 50))
def test_a_window_is_its_halves_end_to_end(rows: list[int], rows_per_page: int, cut: int) -> None:
    plan = plan_of(rows, rows_per_page)
    count = plan.numbering.page_count
    cut = min(cut, count)
    assert plan.window(7, cut) + plan.window(7 + cut, count - cut) == plan.window(7, count)


@given(rows=parts, rows_per_page=page_sizes)
def test_a_page_is_found_by_its_first_row(rows: list[int], rows_per_page: int) -> None:
    numbering = PageNumbering(rows, rows_per_page)
    for number in range(numbering.page_count):
        page = numbering.rows_of(number)
        assert numbering.number_of(page.part, page.first_row) == number
        assert numbering.number_of(page.part, page.first_row + 1) in (None, number + 1)
    assert numbering.number_of(0, rows[0] + rows_per_page) is None


def test_parts_are_drawn_by_their_rows() -> None:
    rows, drawn = [50_000, 10_000, 1_000, 0, 37], [0, 0, 0, 0, 0]
    windows, pages = 2_000, 8
    for seed in range(windows):
        for page in plan_of(rows, 10, str(seed)).window(3, pages):
            drawn[page.part] += 1
    for count, got in zip(rows, drawn, strict=True):
        share = -(-count // 10) / sum(-(-count // 10) for count in rows)
        expected = windows * pages * share
        assert abs(got - expected) <= 5 * math.sqrt(windows * pages * share * (1 - share)) + 1e-9


def test_seeds_data_sets_splits_and_page_sizes_have_orders_of_their_own() -> None:
    orders = {
        tuple(page.first_row // size for page in PagePlan(PageNumbering([1000 * size], size), *key).window(0, 20))
        for size in (1, 2)
        for key in (("a", "train", "1"), ("b", "train", "1"), ("a", "valid", "1"), ("a", "train", "2"))
    }
    assert len(orders) == 8


def test_the_order_never_changes() -> None:
    plan = PagePlan(PageNumbering([1_000_003, 17, 42_000], 100), "sha256:0", "train", "7")
    got = [(page.part, page.first_row, page.row_count) for page in plan.window(10**12, 6)]
    assert got == GOLDEN, "pages that were chosen with an earlier version must be the same with this one"


GOLDEN = [(0, 404800, 100), (0, 513600, 100), (0, 974700, 100), (0, 817100, 100), (0, 541400, 100), (0, 96900, 100)]


def test_more_pages_than_there_are_is_refused_by_number() -> None:
    with pytest.raises(ConfigError, match=r"n_pages=4 is more than the 3 pages of 10 rows"):
        plan_of([25], 10).window(0, 4)


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (0, -1)])
def test_a_window_before_the_beginning_is_refused(offset: int, count: int) -> None:
    with pytest.raises(ConfigError, match="no window"):
        plan_of([25], 10).window(offset, count)


@pytest.mark.parametrize("rows", [0, 10**30])
def test_a_page_without_rows_or_with_more_than_can_be_counted_is_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"num_rows_per_page={rows}"):
        PageNumbering([3], rows)

"""Used chunks within a budget of bytes: those used longest ago go first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.feed.used_chunks import UsedChunks


def test_those_used_longest_ago_go_once_there_is_too_much() -> None:
    used = UsedChunks(100)
    assert used.add([(1, 40), (2, 40)]) == []
    assert used.add([(1, 40)]) == [], "used again: it counts once"
    assert used.add([(3, 40)]) == [2]
    assert used.add([(4, 200)]) == [1, 3, 4]


def test_one_that_is_in_use_again_is_not_among_them() -> None:
    used = UsedChunks(100)
    used.add([(1, 60), (2, 40)])
    used.discard(1)
    used.discard(7)
    assert used.add([(3, 60)]) == []
    assert used.add([(1, 60)]) == [2, 3]


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=5)), st.integers(0, 120))
def test_what_stays_is_never_more_than_the_budget(calls: list[list[tuple[int, int]]], budget: int) -> None:
    used = UsedChunks(budget)
    held: dict[int, int] = {}
    for added in calls:
        held |= dict(added)
        for number in used.add(added):
            held.pop(number, None)
        assert sum(held.values()) <= budget

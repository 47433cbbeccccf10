"""The strided plan against its plainest words: a list, cut into batches, samples taken out as they are excluded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plans.orders import Shuffled
from penstock.plans.strided import Exclusion, StridedEpoch


def in_plain_words(
    ids: list[int],
    batch_size: int,
    exclusions: list[tuple[int, list[int]]],
    resized: dict[int, int],
    *,
    drop_last: bool,
) -> list[list[int]]:
    batches: list[list[int]] = []
    while True:
        batch_size = resized.get(len(batches), batch_size)
        gone = {i for step, excluded in exclusions if step == len(batches) for i in excluded}
        ids = [i for i in ids if i not in gone]
        if not ids or (drop_last and len(ids) < batch_size):
            return batches
        batches.append(ids[:batch_size])
        ids = ids[batch_size:]


@st.composite
def epochs(draw: st.DrawFn) -> tuple[StridedEpoch, list[list[int]]]:
    size = draw(st.integers(1, 80))
    batch_size = draw(st.integers(1, 12))
    drop_last = draw(st.booleans())
    ids = st.lists(st.integers(0, size - 1), max_size=size)
    exclusions = draw(st.lists(st.tuples(st.integers(0, 12), ids), max_size=4))
    resized = draw(st.dictionaries(st.integers(1, 9), st.integers(1, 12), max_size=2))
    order = Shuffled(size, draw(st.integers(0, 99)))
    told = [Exclusion(step, np.array(excluded, dtype=np.int64)) for step, excluded in exclusions]
    epoch = StridedEpoch(order, batch_size, exclusions=told, resized=resized.items(), drop_last=drop_last)
    ids = order.at(np.arange(size)).tolist()
    expected = in_plain_words(ids, batch_size, exclusions, resized, drop_last=drop_last)
    return epoch, expected


@given(epochs())
def test_batches_are_what_plain_words_say(case: tuple[StridedEpoch, list[list[int]]]) -> None:
    epoch, expected = case
    assert epoch.batch_count == len(expected)
    assert [epoch.sample_ids(step).tolist() for step in range(epoch.batch_count)] == expected
    assert epoch.sample_ids(epoch.batch_count).tolist() == []
    for first, last in pairwise(range(0, len(expected) + 3, 2)):
        assert epoch.sample_ids(first, last).tolist() == [i for batch in expected[first:last] for i in batch]


@given(epochs(), st.integers(1, 9))
def test_ranks_together_have_the_global_batch_on_any_world(
    case: tuple[StridedEpoch, list[list[int]]], world: int
) -> None:
    epoch, expected = case
    for step, batch in enumerate(expected):
        shares = [epoch.share(step, rank, world) for rank in range(world)]
        joined = np.empty(len(batch), dtype=np.int64)
        for rank, share in enumerate(shares):
            joined[rank::world] = share
        assert joined.tolist() == batch
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1


def test_excluding_everything_ends_the_epoch() -> None:
    epoch = StridedEpoch(Shuffled(10, 0), 3, exclusions=[Exclusion(2, np.arange(10))])
    assert epoch.batch_count == 2
    assert StridedEpoch(Shuffled(10, 0), 3, exclusions=[Exclusion(0, np.arange(10))]).batch_count == 0
    assert StridedEpoch(Shuffled(0, 0), 3).batch_count == 0


def test_what_a_batch_would_have_been_too_short_for_goes_into_smaller_ones() -> None:
    epoch = StridedEpoch(Shuffled(5, 0), 3, resized=[(1, 1)], drop_last=True)
    assert [len(epoch.sample_ids(step)) for step in range(epoch.batch_count)] == [3, 1, 1]
    late = StridedEpoch(Shuffled(5, 0), 3, resized=[(2, 1)], drop_last=True)
    assert late.batch_count == 1


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0 holds no sample"):
        StridedEpoch(Shuffled(10, 0), 0)
    with pytest.raises(ConfigError, match="rank=4 is not in a world of 4: expected 0 to 3"):
        StridedEpoch(Shuffled(10, 0), 2).share(0, 4, 4)

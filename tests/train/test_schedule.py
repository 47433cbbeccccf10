"""The learning rate, as a function of the run's step and of nothing else."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.schedule import KINDS, Kind, Schedule


def test_it_goes_up_in_a_line_and_is_greatest_when_the_warm_up_ends() -> None:
    subject = Schedule(learning_rate=0.4, kind="cosine", warmup_steps=4, total_steps=10)
    assert [subject.at(step) for step in range(1, 5)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_cosine_and_linear_end_at_the_lowest_rate_and_stay_there() -> None:
    for kind in ("cosine", "linear"):
        subject = Schedule(learning_rate=1.0, kind=kind, warmup_steps=2, total_steps=12, min_ratio=0.25)
        assert subject.at(12) == subject.at(13) == subject.at(10**9) == pytest.approx(0.25)
        half_way = subject.at(7)
        assert half_way == pytest.approx(0.625)


def test_cosine_is_the_cosine() -> None:
    subject = Schedule(learning_rate=2.0, kind="cosine", total_steps=100, min_ratio=0.0)
    assert subject.at(25) == pytest.approx(1.0 + math.cos(math.pi / 4))


def test_constant_knows_no_end() -> None:
    subject = Schedule(learning_rate=0.5, warmup_steps=2)
    assert [subject.at(step) for step in (1, 2, 3, 10**6)] == [0.25, 0.5, 0.5, 0.5]


@given(
    kind=st.sampled_from(KINDS), warmup=st.integers(0, 50), total=st.integers(1, 200), ratio=st.floats(0, 1, width=32)
)
def test_it_never_leaves_its_bounds_nor_goes_up_again(kind: Kind, warmup: int, total: int, ratio: float) -> None:
    subject = Schedule(learning_rate=1.0, kind=kind, warmup_steps=warmup, total_steps=total, min_ratio=ratio)
    rates = [subject.at(step) for step in range(1, 300)]
    assert all(0 < rate <= 1 or (rate == 0 and ratio == 0) for rate in rates)
    assert all(after <= before + 1e-12 for before, after in pairwise(rates[max(0, warmup - 1) :]))

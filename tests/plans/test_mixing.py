"""Mixing: shares are kept, draws are counted, and any position is answered without counting up to it."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plans.mixing import Mixture

weights = st.lists(st.integers(0, 50) | st.floats(0.5, 50), min_size=1, max_size=5).filter(any)


@given(weights=weights, seed=st.integers(0, 9), data=st.data())
def test_every_draw_of_every_data_set_comes_once_in_order(weights: list[float], seed: int, data: st.DataObject) -> None:
    changes = data.draw(st.lists(st.integers(1, 600), unique=True, max_size=2))
    other = st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights)).filter(any)
    mixture = Mixture(weights, seed=seed, schedule={at: data.draw(other) for at in changes})
    sources, draws = mixture.at(np.arange(1000))
    for source in range(len(weights)):
        assert draws[sources == source].tolist() == list(range(int((sources == source).sum())))
    for position in (0, 1, 63, 64, 65, 500, *changes, 999):
        assert (
            mixture.draws_before(position).tolist() == np.bincount(sources[:position], minlength=len(weights)).tolist()
        )
        one_source, one_draw = mixture.at(np.array([position]))
        assert (one_source[0], one_draw[0]) == (sources[position], draws[position])


@given(weights=weights, seed=st.integers(0, 9))
def test_shares_are_kept_all_along(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed=seed)
    shares = np.array(weights) / sum(weights)
    np.testing.assert_allclose(mixture.shares(0), shares, atol=2e-9)
    cycle = mixture._stretches[0].cycle
    for cycles in (1, 2, 7, 1000):
        drawn = mixture.draws_before(cycle * cycles)
        np.testing.assert_allclose(drawn, shares * cycle * cycles, atol=len(weights) + 2e-9 * cycle * cycles)


@given(counts=st.lists(st.integers(0, 400), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_given_counts_are_used_up_together_to_the_draw(counts: list[int], seed: int) -> None:
    mixture = Mixture.of_counts(counts, seed=seed)
    sources, draws = mixture.at(np.arange(sum(counts)))
    assert np.bincount(sources, minlength=len(counts)).tolist() == counts
    for source, count in enumerate(counts):
        assert draws[sources == source].tolist() == list(range(count))
    middle = sum(counts) // 2
    np.testing.assert_allclose(
        np.bincount(sources[:middle], minlength=len(counts)), np.array(counts) / 2, atol=len(counts) + 128
    )
    copy = pickle.loads(pickle.dumps(mixture))  # noqa: S301 - our own
    assert np.array_equal(copy.at(np.arange(sum(counts)))[0], sources)


def test_a_rest_of_a_few_draws_takes_from_nobody() -> None:
    mixture = Mixture.of_counts([164, 90, 3])  # a cycle, and one draw
    sources, _ = mixture.at(np.arange(257))
    assert np.bincount(sources).tolist() == [164, 90, 3]
    assert mixture.draws_before(256).sum() == 256


def test_the_smallest_share_is_drawn_too() -> None:
    mixture = Mixture([1e-6, 1, 1e-3])
    before = [mixture.draws_before(at) for at in range(0, 10**7, 500_000)]
    assert all((later >= earlier).all() for earlier, later in pairwise(before))
    assert 9 <= before[-1][0] + 1 <= 11


def test_a_weight_of_nothing_is_never_drawn() -> None:
    sources, _ = Mixture([1, 0, 2]).at(np.arange(5000))
    assert set(sources.tolist()) == {0, 2}


def test_weights_change_where_they_are_told_to() -> None:
    mixture = Mixture([1, 1], schedule={1000: [1, 0], 2000: [0, 1]})
    sources, _ = mixture.at(np.arange(3000))
    assert 400 < sources[:1000].sum() < 600
    assert not sources[1000:2000].any()
    assert sources[2000:].all()
    assert [mixture.shares(at).tolist() for at in (0, 1999, 2000)] == [[0.5, 0.5], [1, 0], [0, 1]]
    assert [mixture.mean_shares(at).tolist() for at in (0, 500, 2000)] == [[0.5, 0.5], [0.5, 0.5], [0.75, 0.25]]
    np.testing.assert_allclose(mixture.mean_shares(4000), [0.375, 0.625])


def test_far_positions_cost_what_near_ones_do_and_seeds_differ() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], seed=1)
    far = np.arange(10**12, 10**12 + 50)
    _, draws = mixture.at(far)
    assert draws.max() < 0.71 * 10**12
    assert not np.array_equal(mixture.at(far)[0], Mixture([0.7, 0.2, 0.1], seed=2).at(far)[0])
    copy = pickle.loads(pickle.dumps(mixture))  # noqa: S301 - our own
    assert np.array_equal(copy.at(far)[0], mixture.at(far)[0])


def test_data_sets_are_well_mixed_within_a_cycle() -> None:
    sources, _ = Mixture([1, 1]).at(np.arange(20_000))
    runs = np.diff(np.flatnonzero(np.diff(sources)))
    assert 1.7 < runs.mean() < 2.3
    assert runs.max() < 25


@pytest.mark.parametrize("bad", [[], [0, 0], [-1, 2], [float("nan")], [float("inf"), 1], [1e-10, 1]])
def test_weights_that_cannot_be_shared_out_are_refused(bad: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be shared out|is a share of less than"):
        Mixture(bad)
    with pytest.raises(ConfigError, match="1 weights at position 5, expected 2"):
        Mixture([1, 2], schedule={5: [1]})
    with pytest.raises(ConfigError, match="at position -5 cannot be"):
        Mixture([1, 2], schedule={-5: [1, 2]})

"""Orders of an epoch: every sample at one position, whole chunks together where that is promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plans.orders import NUMPY_LIMIT, ORDERS, OrderName, ShardLocal, make_order

sizes = st.integers(0, 300)


@given(
    name=st.sampled_from(ORDERS),
    size=sizes,
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    chunk_size=st.integers(1, 40),
    window_chunks=st.integers(1, 9),
)
def test_every_sample_stands_at_one_position(
    name: OrderName, size: int, seed: int, epoch: int, chunk_size: int, window_chunks: int
) -> None:
    order = make_order(name, size, seed=seed, epoch=epoch, chunk_size=chunk_size, window_chunks=window_chunks)
    positions = np.arange(size)
    ids = order.at(positions)
    assert sorted(ids.tolist()) == positions.tolist()
    np.testing.assert_array_equal(order.position_of(ids), positions)
    for position in range(0, size, 7):  # any position alone is what it is among others
        assert order.at(np.array([position]))[0] == ids[position]


@given(size=st.integers(1, 300), chunk_size=st.integers(1, 40), window_chunks=st.integers(1, 9), seed=st.integers(0, 9))
def test_a_window_is_made_of_whole_chunks(size: int, chunk_size: int, window_chunks: int, seed: int) -> None:
    order = ShardLocal(size, seed, chunk_size=chunk_size, window_chunks=window_chunks)
    ids = order.at(np.arange(size))
    assert order.window_start(order.window_count) == size
    read: list[int] = []
    for window in range(order.window_count):
        start, stop = order.window_start(window), order.window_start(window + 1)
        chunks = order.window_chunk_ids(window).tolist()
        expected = [i for chunk in chunks for i in range(chunk * chunk_size, min(size, (chunk + 1) * chunk_size))]
        of_chunk, places = order.window_order(window)
        assert ids[start:stop].tolist() == (np.array(chunks)[of_chunk] * chunk_size + places).tolist()
        assert sorted(ids[start:stop].tolist()) == sorted(expected)
        assert (order.window_of(np.arange(start, stop)) == window).all()
        read += chunks
    assert sorted(read) == list(range(order.chunk_count))


@pytest.mark.parametrize("name", ["shuffled", "shard-local", "numpy"])
def test_every_epoch_seed_and_source_has_an_order_of_its_own(name: OrderName) -> None:
    shapes = [(0, 0, ""), (0, 1, ""), (1, 0, "")] + ([(0, 0, "b")] if name != "numpy" else [])
    orders = {
        tuple(make_order(name, 500, seed=seed, epoch=epoch, source=source, chunk_size=10).at(np.arange(500)))
        for seed, epoch, source in shapes
    }
    assert len(orders) == len(shapes) - (name == "numpy")  # numpy's seed + epoch is what it is: (0, 1) is (1, 0)


def test_the_numpy_order_is_the_one_others_make() -> None:
    order = make_order("numpy", 100, seed=42, epoch=3)
    np.testing.assert_array_equal(order.at(np.arange(100)), np.random.default_rng(45).permutation(100))


def test_far_positions_of_a_huge_order_cost_what_near_ones_do() -> None:
    order = make_order("shard-local", 10**12, seed=1, epoch=0)
    positions = np.arange(99 * 10**10, 99 * 10**10 + 64)
    np.testing.assert_array_equal(order.position_of(order.at(positions)), positions)


def test_what_is_no_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="order='random' is unknown: expected one of sequential"):
        make_order("random", 1, seed=0, epoch=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="would be an array of all of them"):
        make_order("numpy", NUMPY_LIMIT + 1, seed=0, epoch=0)
    with pytest.raises(ConfigError, match="chunk_size=0, window_chunks=16 hold no sample"):
        make_order("shard-local", 1, seed=0, epoch=0, chunk_size=0)

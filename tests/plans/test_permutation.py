"""The permutation without an array: a bijection for every size, both ways, and different for every key."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plans.permutation import LARGEST, Permutation, derive_key

AROUND_POWERS = [2**k + near for k in range(13, 23) for near in (-1, 0, 1)]


def assert_bijection(size: int, *key: int | str) -> None:
    permutation = Permutation(size, derive_key(*key))
    values = permutation.at(np.arange(size))
    seen = np.zeros(size, dtype=bool)
    seen[values] = True
    assert seen.all(), size
    np.testing.assert_array_equal(permutation.position_of(values), np.arange(size))


def test_it_is_a_bijection_for_every_size_up_to_5000() -> None:
    for size in range(5001):
        values = Permutation(size, derive_key("every size", size)).at(np.arange(size))
        assert np.array_equal(np.sort(values), np.arange(size)), size


@pytest.mark.parametrize("size", AROUND_POWERS)
def test_it_is_a_bijection_around_powers_of_two(size: int) -> None:
    assert_bijection(size, "around", size)


@given(size=st.integers(1, LARGEST), seed=st.integers(), data=st.data())
def test_it_goes_there_and_back_at_any_size(size: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(size, derive_key(seed))
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    values = permutation.at(np.array(positions, dtype=np.int64))
    assert ((values >= 0) & (values < size)).all()
    assert len(set(values.tolist())) == len(positions)
    assert permutation.position_of(values).tolist() == positions
    assert [permutation.at(position) for position in positions] == values.tolist()


@pytest.mark.parametrize("size", [2, 129, 300, 2_049, 3_904, 4_096, 16_384, 16_385, 40_000])
def test_alone_among_some_and_among_all_a_position_holds_the_same(size: int) -> None:
    permutation = Permutation(size, derive_key("alone", size))
    values = permutation.at(np.arange(size))
    for every in (1, 2, 7):
        some = np.arange(size)[::every]
        assert np.array_equal(permutation.at(some), values[::every])
        assert np.array_equal(permutation.position_of(values[::every]), some)
    assert [permutation.at(position) for position in range(0, size, 97)] == values[::97].tolist()


def test_a_trillion_is_spot_checked() -> None:
    permutation = Permutation(10**12, derive_key("far"))
    positions = np.random.default_rng(0).integers(0, 10**12, 200_000)
    values = permutation.at(np.unique(positions))
    assert len(np.unique(values)) == len(values)
    # Evenly over the range, and unrelated to where they were.
    counts = np.histogram(values, bins=100, range=(0, 10**12))[0]
    assert abs(counts - len(values) / 100).max() < 6 * np.sqrt(len(values) / 100)
    assert abs(np.corrcoef(np.unique(positions), values)[0, 1]) < 0.02


@pytest.mark.parametrize("size", [3, 4])
def test_every_order_of_a_few_is_as_likely_as_any_other(size: int) -> None:
    orders = Counter(tuple(Permutation(size, derive_key(seed)).at(np.arange(size)).tolist()) for seed in range(6000))
    expected = 6000 / {3: 6, 4: 24}[size]
    assert len(orders) == {3: 6, 4: 24}[size]
    assert all(abs(count - expected) < 6 * np.sqrt(expected) for count in orders.values())


@pytest.mark.parametrize("size", [10, 100, 1000, 4097, 65537])
def test_neighbours_do_not_stay_neighbours(size: int) -> None:
    steps = [np.diff(Permutation(size, derive_key("steps", seed)).at(np.arange(size))) for seed in range(200)]
    share = np.mean([np.mean(np.abs(step) == 1) for step in steps])
    assert share == pytest.approx(2 / size, abs=0.02)


def test_keys_depend_on_every_part_and_on_its_place() -> None:
    parts = [(42, 1), (43, 0), (421,), (4, 21), ("42", 1), (42, "1"), (1, 42), (42, 1, ""), ("a;b",), ("a", "b")]
    assert len({derive_key(*part) for part in parts}) == len(parts)
    first, second = (Permutation(1000, derive_key(*key)).at(np.arange(1000)) for key in ((42, 1), (43, 0)))
    assert not np.array_equal(first, second)


def test_it_is_the_same_in_every_process_and_on_every_machine() -> None:
    code = (
        "import numpy as np; from penstock.plans.permutation import Permutation, derive_key;"
        "print(Permutation(1000003, derive_key(7, 'x')).at(np.arange(0, 1000003, 250000)).tolist())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    golden = Permutation(1000003, derive_key(7, "x"))
    assert told == {f"{golden.at(np.arange(0, 1000003, 250000)).tolist()}\n"}
    assert golden.at(np.arange(5)).tolist() == GOLDEN, "this order is in users' checkpoints: it must never change"


GOLDEN = [551415, 219381, 878560, 583768, 667400]


def test_it_pickles_and_holds_no_array() -> None:
    stored = pickle.dumps(Permutation(10**15, derive_key(1)))
    assert len(stored) < 2000


@pytest.mark.parametrize("size", [-1, LARGEST + 1])
def test_sizes_it_cannot_permute_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"size={size} cannot be permuted"):
        Permutation(size, derive_key(1))


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(ConfigError, match="are not all in 0 to 9"):
        Permutation(10, derive_key(1)).at(np.array([0, position]))

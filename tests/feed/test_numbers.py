"""Numbers as users give them: whatever type they have, orders and states are those of the number; masks are no ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feed.stores import make_small_store
from penstock.errors import ConfigError
from penstock.feed import DistributedLoader
from penstock.feed.numbers import sample_numbers, whole_number
from penstock.feed.rows import ONLY_IDS
from penstock.plans.permutation import derive_key


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_store(tmp_path_factory.mktemp("numbers"))


def ids_of(loader: DistributedLoader) -> list[list[int]]:
    return [batch["sample_ids"].tolist() for batch in loader]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_an_epoch_has_one_order_whatever_counts_the_epochs(store: Path, kind: Any) -> None:
    plain, other = DistributedLoader(store, 7), DistributedLoader(store, 7)
    plain.reshuffle(2)
    other.reshuffle(kind(2))
    state = json.loads(json.dumps(other.state_dict()))
    told = ids_of(plain)
    assert ids_of(other) == told
    assert DistributedLoader(store, 7).batch(kind(2), kind(1))["sample_ids"].tolist() == told[1]
    resumed = DistributedLoader(store, 7)
    resumed.load_state_dict(state)
    assert ids_of(resumed) == told


def test_a_seed_and_a_batch_size_of_numpy_are_the_numbers_they_are(store: Path) -> None:
    plain, other = DistributedLoader(store, 7, 3), DistributedLoader(store, np.int32(7), np.int64(3))  # pyright: ignore[reportArgumentType]
    assert json.dumps(other.state_dict()) == json.dumps(plain.state_dict())
    assert ids_of(other) == ids_of(plain)


def test_fields_in_a_list_are_those_in_a_tuple(store: Path) -> None:
    more: Any = {"tokenizer": "tokenizer.json", "sequence_length": 16, "fields": ["input_ids"]}
    assert DistributedLoader(store, 4, **more)._settings.fields == ONLY_IDS


def test_a_key_goes_by_numbers_and_not_by_their_types() -> None:
    assert derive_key("a", np.int64(3)) == derive_key("a", 3)  # pyright: ignore[reportArgumentType]
    assert derive_key("a", "3") != derive_key("a", 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 7.0}, r"batch_size=7\.0 is of type float: expected a whole number"),
        ({"seed": "3"}, "seed='3' is of type str: expected a whole number"),
        ({"rank": "0", "world_size": "2"}, "rank='0' is of type str: expected a whole number"),
        ({"seed": -1, "order": "numpy"}, "seed=-1 is none of numpy's.*expected 0 or more"),
    ],
)
def test_what_is_no_whole_number_is_refused_when_it_is_given(store: Path, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedLoader(store, **{"batch_size": 4, **settings})


def test_epochs_that_are_no_whole_numbers_are_refused(store: Path) -> None:
    loader = DistributedLoader(store, 7)
    with pytest.raises(ConfigError, match=r"epoch=1\.5 is of type float"):
        loader.reshuffle(1.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "given", [{4, 12}, (number for number in (12, 4, 4)), np.array([4, 12], dtype=np.uint16), torch.tensor([12, 4])]
)
def test_ids_may_be_in_anything_that_holds_numbers(given: Any) -> None:
    assert sample_numbers(given).tolist() == [4, 12]
    assert sample_numbers([]).tolist() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.arange(203) < 100, r"which is a mask: expected numbers, as np\.flatnonzero\(mask\)"),
        ([True, False], "which is a mask"),
        ([1.5], r"sample_ids 1\.5, \.\.\. are not all whole numbers"),
        (["12"], r"sample_ids '12', \.\.\. are not all whole numbers"),
        ("12", "sample_ids='12' is no collection"),
        (5, "sample_ids=5 is no collection"),
        ([[1, 2], [3, 4]], "are not all whole numbers in a row"),
        ([2**70], "are not all whole numbers"),
        (np.array([2**63], dtype=np.uint64), "sample 9223372036854775808 is beyond all data sets"),
    ],
)
def test_what_are_no_ids_is_refused_and_nothing_is_excluded(store: Path, given: Any, message: str) -> None:
    loader = DistributedLoader(store, 7)
    with pytest.raises(ConfigError, match=message):
        loader.exclude(given, at_once=True)
    assert not loader.position.exclusions


def test_a_number_is_pythons_own() -> None:
    assert type(whole_number("epoch", np.int64(3))) is int

"""Mixtures: each data set keeps its own epochs, shares are kept, and what holds of one data set holds of several."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock import Mix
from penstock.blocks import BlockManager, ingest
from penstock.errors import ConfigError
from penstock.feed import Tokenizer, source_feed, token_cache, train_tokenizer
from penstock.feed.loader import DistributedLoader
from penstock.feed.pieces import PACKINGS, Packing
from penstock.plans.orders import ORDERS

SIZES = {"web": 90, "code": 41, "tiny": 3}
LENGTH = 16
TEXTS = {name: [f"{name} {i} " + "word " * (i * 7 % 13) for i in range(size)] for name, size in SIZES.items()}

examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([text for texts in TEXTS.values() for text in texts], vocab_size=300)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BlockManager]:
    folder = tmp_path_factory.mktemp("stores")
    for name, texts in TEXTS.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
        ingest(folder / f"{name}.jsonl", folder / name, block_size=20)
    return {name: BlockManager(folder / name) for name in TEXTS}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 300)
    monkeypatch.setattr(source_feed, "WINDOW_CHUNKS", 2)


shapes = st.fixed_dictionaries(
    {
        "names": st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=3, unique=True),
        "by": st.sampled_from(["weights", "epochs", "schedule"]),
        "numbers": st.lists(st.integers(1, 4), min_size=3, max_size=3),
        "batch_size": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "order": st.sampled_from(ORDERS),
        "packing": st.sampled_from([None, *PACKINGS]),
    }
)


class Case:
    """A way to make loaders over one mixture, for any rank."""

    def __init__(self, shape: dict[str, Any], stores: dict[str, BlockManager], tokenizer: Tokenizer) -> None:
        self.names: list[str] = shape["names"]
        self.by: str = shape["by"]
        self.numbers = dict(zip(self.names, shape["numbers"], strict=False))
        self.packing: Packing | None = shape["packing"]
        self._shape = shape
        self._stores = stores
        self._tokenizer = tokenizer

    def mix(self, **changes: Any) -> Mix:
        chosen: dict[str, Any] = {"epochs": self.numbers}
        if self.by != "epochs":
            chosen = {"weights": self.numbers, "steps_per_epoch": 7}
        if self.by == "schedule":
            chosen["schedule"] = {3: {name: 5 - number for name, number in self.numbers.items()}}
        return Mix({name: self._stores[name] for name in self.names}, **{**chosen, **changes})

    def loader(self, rank: int = 0, world: int = 1, **changes: Any) -> DistributedLoader:
        more: dict[str, Any] = {}
        if self.packing is not None:
            more = {"tokenizer": self._tokenizer, "sequence_length": LENGTH, "packing": self.packing}
        chosen = {name: self._shape[name] for name in ("batch_size", "seed", "order")} | changes
        loader = DistributedLoader(self.mix(), rank=rank, world_size=world, **chosen, **more)
        if self.packing is not None:
            for source in loader._feed.sources:
                source.token_cache.build()
        return loader

    def samples(self, batches: list[dict[str, Any]]) -> dict[str, list[int]]:
        """The samples of each data set, in order."""
        found: dict[str, list[int]] = {name: [] for name in self.names}
        for batch in batches:
            for number, sample_id in zip(batch["source_ids"], batch["sample_ids"], strict=True):
                found[self.names[number]].append(int(sample_id))
        return found


@pytest.fixture
def make_case(stores: dict[str, BlockManager], tokenizer: Tokenizer) -> Any:
    return lambda shape: Case(shape, stores, tokenizer)


def rows_of(batch: dict[str, Any]) -> list[Any]:
    if "text" in batch:
        rows = batch["text"]
    elif batch["input_ids"].ndim == 2:
        rows = batch["input_ids"].tolist()
    else:
        rows = [batch["input_ids"][a:b].tolist() for a, b in pairwise(batch["cu_seqlens"].tolist())]
    numbers = batch["row_sources"] if "row_sources" in batch else batch["source_ids"]
    assert len(numbers) == len(rows)
    return list(zip(numbers.tolist(), rows, strict=True))


def joined(shares: list[dict[str, Any]]) -> list[Any]:
    rows = [rows_of(share) for share in shares]
    return [rows[place % len(rows)][place // len(rows)] for place in range(sum(map(len, rows)))]


def epoch_of(make: Any, world: int) -> list[list[Any]]:
    ranks = [list(make(rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1, "every rank ends on the same step"
    return [joined(list(shares)) for shares in zip(*ranks, strict=True)]


@examples
@given(shape=shapes)
def test_by_epochs_every_sample_comes_as_often_as_asked_and_never_again_before_all_others(
    make_case: Any, shape: dict[str, Any]
) -> None:
    case = make_case({**shape, "by": "epochs"})
    loader = case.loader()
    for epoch in range(2):
        assert loader.epoch == epoch
        count = loader.batches_per_epoch
        batches = list(loader)
        assert len(batches) == count
        for name, ids in case.samples(batches).items():
            passes = [ids[at : at + SIZES[name]] for at in range(0, len(ids), SIZES[name])]
            assert len(passes) == case.numbers[name]
            assert all(sorted(once) == list(range(SIZES[name])) for once in passes)


@examples
@given(shape=shapes)
def test_by_weights_data_sets_start_over_by_themselves_and_shares_are_kept(
    make_case: Any, shape: dict[str, Any]
) -> None:
    case = make_case({**shape, "by": "weights", "batch_size": 20})
    loader = case.loader()
    batches = [batch for _ in range(3) for batch in loader]
    assert len(batches) == 21
    for name, ids in case.samples(batches).items():
        passes = [ids[at : at + SIZES[name]] for at in range(0, len(ids), SIZES[name])]
        assert all(sorted(once) == list(range(SIZES[name])) for once in passes[:-1])
        assert not passes or len(set(passes[-1])) == len(passes[-1])
    for told in loader.mixture():
        assert told["draws"] == sum(
            int((numbers_of(batch) == case.names.index(told["name"])).sum()) for batch in batches
        )
        assert told["weight"] == pytest.approx(case.numbers[told["name"]] / sum(case.numbers.values()), abs=1e-8)
        assert told["target_share"] == pytest.approx(told["weight"])
        assert abs(told["draws"] / 420 - told["target_share"]) < 0.15
    assert sum(told["observed_share"] for told in loader.mixture()) == pytest.approx(1)


def numbers_of(batch: dict[str, Any]) -> np.ndarray:
    return batch["row_sources"] if "row_sources" in batch else batch["source_ids"]


@examples
@given(shape=shapes, world=st.integers(2, 5))
def test_global_batches_are_the_same_on_any_world(make_case: Any, shape: dict[str, Any], world: int) -> None:
    case = make_case(shape)
    assert epoch_of(case.loader, world) == epoch_of(case.loader, 1)


@examples
@given(shape=shapes, stop=st.integers(0, 20), worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_stopped_at_any_step_and_resumed_on_another_world_the_rest_is_the_same(
    make_case: Any, shape: dict[str, Any], stop: int, worlds: tuple[int, int]
) -> None:
    case = make_case(shape)
    loader = case.loader()
    whole = [joined([batch]) for _ in range(2) for batch in loader]
    states = []
    for rank in range(worlds[0]):
        loader = case.loader(rank, worlds[0])
        batches = (batch for _ in range(2) for batch in loader)
        for _, _ in zip(range(stop), batches, strict=False):
            pass
        states.append(json.dumps(loader.state_dict()))
    assert len(set(states)) == 1, "one state for all ranks"
    assert len(states[0]) < 4096
    if json.loads(states[0])["epoch"] > 1:
        return

    def resumed(rank: int, world: int) -> Any:
        loader = case.loader(rank, world)
        loader.load_state_dict(json.loads(states[0]))
        loader.reshuffle(loader.epoch)  # the same epoch: changes nothing
        for _ in range(2 - loader.epoch):
            yield from loader

    assert epoch_of(resumed, worlds[1]) == whole[stop:]


@examples
@given(shape=shapes, world=st.integers(1, 3))
def test_a_batch_by_number_is_the_one_that_iterating_gives(make_case: Any, shape: dict[str, Any], world: int) -> None:
    case = make_case(shape)
    loader = case.loader(world - 1, world)
    for epoch in range(2):
        batches = list(loader)
        other = case.loader(world - 1, world)
        other.reshuffle(epoch)
        assert len(other) == len(batches)
        for k, batch in enumerate(batches):
            for again in (other[k], *([case.loader(world - 1, world).batch(epoch, k)] if k % 7 == 0 else [])):
                assert again.keys() == batch.keys()
                assert all(np.array_equal(again[name], batch[name]) for name in batch)
        assert [joined([batch]) for batch in other] == [joined([batch]) for batch in batches]


@examples
@given(shape=shapes, stop=st.integers(0, 6), batch_size=st.integers(1, 20))
def test_another_batch_size_goes_on_with_the_very_next_draw(
    make_case: Any, shape: dict[str, Any], stop: int, batch_size: int
) -> None:
    case = make_case({**shape, "by": "epochs"})
    rows = [row for batch in epoch_of(case.loader, 1) for row in batch]
    loader = case.loader()
    got = [row for _, batch in zip(range(stop), loader, strict=False) for row in joined([batch])]
    other = case.loader(batch_size=batch_size)
    other.load_state_dict(loader.state_dict(), allow={"batch_size"})
    if other.epoch:
        return
    left = other.batches_per_epoch - other.step
    batches = list(other)
    assert len(batches) == left
    assert got + [row for batch in batches for row in joined([batch])] == rows


@examples
@given(shape=shapes, stop=st.integers(1, 5), excluded=st.sets(st.integers(0, 40)), at_once=st.booleans())
@example(  # few are left: in the first window of one epoch, in the last of the next
    shape={"numbers": [1, 1, 1], "seed": 0, "order": "shard-local", "packing": "concatenate"},
    stop=1,
    excluded={*range(32), 37, 38, 40},
    at_once=False,
)
def test_excluded_samples_come_no_more(
    make_case: Any, shape: dict[str, Any], stop: int, excluded: set[int], at_once: bool
) -> None:
    case = make_case({**shape, "names": ["web", "code"], "by": "weights", "batch_size": 17})
    loader = case.loader()
    iterator = iter(loader)
    before = [next(iterator) for _ in range(stop)]
    loader.exclude(excluded, source="code", at_once=at_once)
    state = loader.state_dict()
    after = [*iterator, *(batch for _ in range(4) for batch in loader)]
    ids = case.samples(before + after)["code"]
    later = case.loader()
    later.load_state_dict(json.loads(json.dumps(state)))
    resumed = [batch for _ in range(5) for batch in later]
    assert case.samples(resumed) == case.samples(after)
    if excluded == set(range(41)):
        return
    own = [i for i in ids if i not in excluded]
    assert all(own.count(i) - own.count(own[0]) in (-1, 0, 1) for i in set(own)), "all others come equally often"
    following = case.samples(after)["code"]
    assert all(following.count(i) <= 1 for i in excluded)
    if at_once and case.packing is None:
        assert not excluded & set(following)


@pytest.mark.parametrize("packing", [None, "concatenate"])
def test_by_epochs_exclusions_wait_for_the_next_epoch_and_break_nothing(
    make_case: Any, packing: Packing | None
) -> None:
    case = make_case(
        {"names": ["web", "code"], "by": "epochs", "numbers": [1, 2], "batch_size": 7, "seed": 1}
        | {"order": "shard-local", "packing": packing}
    )
    loader = case.loader()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(5)]
    with pytest.raises(ConfigError, match="has counted this epoch's draws"):
        loader.exclude(range(20), source="code", at_once=True)
    loader.exclude(range(20), source="code")
    ids = case.samples([*first, *iterator])
    assert sorted(ids["web"]) == list(range(90))
    assert sorted(ids["code"]) == sorted(list(range(41)) * 2)
    following = case.samples(list(loader))
    assert sorted(following["web"]) == list(range(90))
    assert sorted(following["code"]) == sorted(list(range(20, 41)) * 2)


def test_by_weights_the_batch_size_stays(make_case: Any) -> None:
    case = make_case(
        {"names": ["web"], "by": "weights", "numbers": [1], "batch_size": 7, "seed": 1}
        | {"order": "shuffled", "packing": None}
    )
    with pytest.raises(ConfigError, match="a mix by weights counts epochs and schedule in steps"):
        case.loader(batch_size=5).load_state_dict(case.loader().state_dict(), allow={"batch_size"})


def test_what_shapes_the_mixture_is_refused_by_name_when_it_changes(stores: dict[str, BlockManager]) -> None:
    sets = {name: stores[name] for name in ("web", "code")}
    state = DistributedLoader(Mix(sets, weights={"web": 1, "code": 2}, steps_per_epoch=3), 4).state_dict()
    for mix, field in (
        (Mix(sets, weights={"web": 2, "code": 2}, steps_per_epoch=3), "weights: got"),
        (Mix(sets, weights={"web": 1, "code": 2}, steps_per_epoch=4), "steps_per_epoch: got 4, expected 3"),
        (Mix(sets, weights={"web": 1, "code": 2}, steps_per_epoch=3, schedule={5: {"web": 1}}), "schedule: got"),
        (Mix(sets), "epochs: got"),
        (Mix({"web": stores["web"], "code": stores["tiny"]}, weights={"web": 1, "code": 2}, steps_per_epoch=3), "mix"),
    ):
        with pytest.raises(ConfigError, match=f"the state belongs to other batches: .*{field}"):
            DistributedLoader(mix, 4).load_state_dict(state)


def test_mixtures_that_cannot_work_are_refused(tmp_path: Path, stores: dict[str, BlockManager]) -> None:
    sets = {name: stores[name] for name in ("web", "code")}
    for chosen, told in (
        ({"datasets": {}}, "a mix needs data sets"),
        ({"weights": {"web": 1}, "epochs": {"web": 1}}, "by weights or by epochs"),
        ({"weights": {"wob": 1}}, "weights name wob: expected some of web, code"),
        ({"weights": {"web": 1}, "schedule": {3: {"wob": 1}}}, "weights from step 3 on name wob"),
        ({"weights": {"web": -1, "code": 2}}, "weights web=-1 are no shares: expected numbers from 0 on"),
        ({"weights": {"web": 1, "code": float("nan")}}, "weights code=nan are no shares"),
        ({"epochs": {"web": 0}}, "epochs of web are below 1"),
        ({"steps_per_epoch": 3}, "go with weights"),
        ({"weights": {"web": 1}, "steps_per_epoch": 0}, "steps_per_epoch=0 is no epoch"),
        ({"weights": {"web": 1}, "steps_per_epoch": 2.5}, r"steps_per_epoch=2\.5 is of type float"),
        ({"weights": {"web": 1}, "schedule": {1.5: {"web": 1}}}, r"step=1\.5 is of type float"),
        ({"epochs": {"web": 1.5}}, r"epochs of web=1\.5 is of type float: expected a whole number"),
        ({"datasets": {0: stores["web"]}}, r"data sets are named \[0\]: expected texts"),
    ):
        with pytest.raises(ConfigError, match=told):
            Mix(**{"datasets": sets, **chosen})
    with pytest.raises(ConfigError, match="cannot be shared out"):
        next(iter(DistributedLoader(Mix(sets, weights={"web": 0}, steps_per_epoch=1), 4)))
    loader = DistributedLoader(Mix(sets), 4)
    with pytest.raises(ConfigError, match="source=None is no data set of this mix: expected one of web, code"):
        loader.exclude([1])
    with pytest.raises(ConfigError, match="only a mix has shares"):
        DistributedLoader(stores["web"], 4).mixture()
    with pytest.raises(ConfigError, match="source='web' names a data set of a mixture"):
        DistributedLoader(stores["web"], 4).exclude([1], source="web")
    (tmp_path / "empty.jsonl").write_text("")
    ingest(tmp_path / "empty.jsonl", tmp_path / "empty", 5, text_column="text")
    mix = Mix({"empty": tmp_path / "empty", "web": stores["web"]}, weights={"empty": 1, "web": 1})
    with pytest.raises(ConfigError, match="data set 'empty' has nothing to draw"):
        list(DistributedLoader(mix, 4))


def test_a_data_set_that_no_weight_names_is_told_to_be_left_out(
    stores: dict[str, BlockManager], caplog: pytest.LogCaptureFixture
) -> None:
    sets = {"web": stores["web"], "code": stores["code"]}
    Mix(sets, weights={"web": 1, "code": 0})
    assert not caplog.messages
    Mix(sets, weights={"web": 1})
    assert caplog.messages == ["weights do not name code: left out of the mix; give 0 to say so"]


def test_counts_that_are_not_known_yet_are_asked_for(
    tmp_path: Path, stores: dict[str, BlockManager], tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 20)
    ingest(tmp_path / "a.jsonl", tmp_path / "a", 5)
    sets = {"a": tmp_path / "a", "tiny": stores["tiny"]}
    more: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": LENGTH}
    advice = f"data set 'a' .* are not tokenised: run `penstock tokenize {tmp_path / 'a'}`.* or mix by weights and give"
    with pytest.raises(ConfigError, match=advice) as caught:
        list(DistributedLoader(Mix(sets), 4, **more))
    assert "or iterate" not in str(caught.value)  # that is what was tried
    with pytest.raises(ConfigError, match="has no end yet: give steps_per_epoch"):
        list(DistributedLoader(Mix(sets, weights={"a": 1}), 4, **more))
    endless = DistributedLoader(Mix(sets, weights={"a": 1, "tiny": 1}, steps_per_epoch=5), 4, **more)
    assert len(list(endless)) == 5  # by weights and steps nothing has to be counted
    assert endless.epoch == 1


def test_a_mixture_goes_to_another_process_as_it_stands(stores: dict[str, BlockManager]) -> None:
    loader = DistributedLoader(Mix(dict(stores)), 8)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))  # noqa: S301 - our own
    assert [batch["text"] for batch in copy] == [batch["text"] for batch in loader]

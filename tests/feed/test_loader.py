"""DistributedLoader: every sample once, the same global batches on any world, resumed anywhere with nothing changed."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.blocks import BlockManager, ingest
from penstock.errors import BlockStoreError, ConfigError, PenstockError
from penstock.feed import Tokenizer, source_feed, token_cache, train_tokenizer
from penstock.feed.chat import ChatFormat
from penstock.feed.loader import DistributedLoader
from penstock.feed.pieces import PACKINGS, Packing
from penstock.feed.token_cache import TokenCache
from penstock.plans.orders import ORDERS, OrderName

SIZES = (1, 2, 7, 50, 203)
TEXTS = [f"sample {number}: " + "word " * (number * 7 % 23) for number in range(max(SIZES))]
for place in range(0, len(TEXTS), 11):
    TEXTS[place] = ""
LENGTH = 16

examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, BlockManager]:
    """Data sets of several sizes, in blocks of 40."""
    folder = tmp_path_factory.mktemp("stores")
    made = {}
    for size in SIZES:
        raw = folder / f"{size}.jsonl"
        raw.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS[:size]))
        ingest(raw, folder / f"{size}", block_size=40)
        made[size] = BlockManager(folder / f"{size}")
    return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few samples and windows of a few chunks, so that small data sets have many of both."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 400)
    monkeypatch.setattr(source_feed, "WINDOW_CHUNKS", 3)


def joined(shares: list[dict[str, Any]], world: int) -> list[Any]:
    """The rows of a global batch from its ranks' shares: texts, or lists of ids."""
    rows = [_rows(share) for share in shares]
    total = sum(map(len, rows))
    return [rows[place % world][place // world] for place in range(total)]


def _rows(share: dict[str, Any]) -> list[Any]:
    if "text" in share:
        return list(share["text"])
    if share["input_ids"].ndim == 2:
        return share["input_ids"].tolist()
    bounds = share["cu_seqlens"].tolist()
    return [share["input_ids"][first:stop].tolist() for first, stop in pairwise(bounds)]


def epoch_of(make: Any, world: int) -> list[list[Any]]:
    """The global batches of the rest of an epoch, from all ranks."""
    ranks = [list(make(rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1, "every rank ends on the same step"
    return [joined(list(shares), world) for shares in zip(*ranks, strict=True)]


shapes = st.fixed_dictionaries(
    {
        "size": st.sampled_from(SIZES),
        "batch_size": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "order": st.sampled_from(ORDERS),
        "drop_last": st.booleans(),
        "packing": st.sampled_from([None, *PACKINGS]),
    }
)


class Case:
    """A way to make loaders of one shape, for any rank."""

    def __init__(self, shape: dict[str, Any], stores: dict[int, BlockManager], tokenizer: Tokenizer) -> None:
        self.size: int = shape["size"]
        self.packing: Packing | None = shape["packing"]
        self.packed = self.packing is not None
        self.drop_last: bool = shape["drop_last"]
        self.batch_size: int = shape["batch_size"]
        self._order: OrderName = shape["order"]
        self._seed: int = shape["seed"]
        self._blocks = stores[self.size]
        self._tokenizer = tokenizer

    def loader(self, rank: int = 0, world: int = 1, **changes: Any) -> DistributedLoader:
        more: dict[str, Any] = {}
        if self.packed:
            more = {"tokenizer": self._tokenizer, "sequence_length": LENGTH, "packing": self.packing}
        chosen = {"batch_size": self.batch_size, "seed": self._seed, **changes}
        return DistributedLoader(
            self._blocks,
            rank=rank,
            world_size=world,
            order=self._order,
            drop_last=self.drop_last,
            **chosen,
            **more,
        )

    def sample_ids(self, batches: list[dict[str, Any]]) -> list[int]:
        return [int(i) for batch in batches for i in batch["sample_ids"]]


@pytest.fixture
def make_case(stores: dict[int, BlockManager], tokenizer: Tokenizer) -> Any:
    return lambda shape: Case(shape, stores, tokenizer)


@examples
@given(shape=shapes)
def test_every_sample_is_in_one_batch_of_an_epoch(make_case: Any, shape: dict[str, Any]) -> None:
    case = make_case({**shape, "drop_last": False})
    loader = case.loader()
    batches = list(loader)
    assert sorted(case.sample_ids(batches)) == list(range(case.size))
    assert (loader.epoch, loader.step) == (1, 0)
    if not case.packed:
        texts = [text for batch in batches for text in batch["text"]]
        assert texts == [TEXTS[i] for i in case.sample_ids(batches)]
    else:
        tokens = sum(len(case._tokenizer.encode([text]).ids) for text in TEXTS[: case.size])
        assert sum(int((batch["document_ids"] >= 0).sum()) for batch in batches) == tokens


@examples
@given(shape=shapes, world=st.integers(1, 9))
def test_global_batches_are_the_same_on_any_world(make_case: Any, shape: dict[str, Any], world: int) -> None:
    case = make_case(shape)
    assert epoch_of(case.loader, world) == epoch_of(case.loader, 1)


@examples
@given(shape=shapes, stop=st.integers(0, 30), worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_stopped_at_any_step_and_resumed_on_another_world_the_rest_is_the_same(
    make_case: Any, shape: dict[str, Any], stop: int, worlds: tuple[int, int]
) -> None:
    case = make_case(shape)
    whole = epoch_of(case.loader, 1)
    states = []
    for rank in range(worlds[0]):
        loader = case.loader(rank, worlds[0])
        for _, _ in zip(range(stop), loader, strict=False):
            pass
        states.append(json.dumps(loader.state_dict()))
    assert len(set(states)) == 1, "one state for all ranks"
    assert len(states[0]) < 4096
    if json.loads(states[0])["epoch"] == 1:
        return

    def resumed(rank: int, world: int) -> DistributedLoader:
        loader = case.loader(rank, world)
        loader.load_state_dict(json.loads(states[0]))
        loader.reshuffle(loader.epoch)  # the same epoch: changes nothing
        return loader

    assert epoch_of(resumed, worlds[1]) == whole[stop:]


@examples
@given(shape=shapes, epoch=st.integers(0, 2), world=st.integers(1, 3))
def test_a_batch_by_number_is_the_one_that_iterating_gives(
    make_case: Any, shape: dict[str, Any], epoch: int, world: int
) -> None:
    case = make_case(shape)
    loader = case.loader(world - 1, world)
    if case.packed:
        loader.token_cache.build()
    loader.reshuffle(epoch)
    assert len(loader) == loader.batches_per_epoch
    batches = list(loader)
    loader.reshuffle(epoch)
    assert loader.batches_per_epoch == len(batches)
    for k, batch in enumerate(batches):
        again = loader[k] if k % 7 else case.loader(world - 1, world).batch(epoch, k)
        assert again.keys() == batch.keys()
        assert all(np.array_equal(again[name], batch[name]) for name in batch)


@examples
@given(
    shape=shapes,
    stop=st.integers(0, 12),
    excluded=st.sets(st.integers(0, max(SIZES) - 1), max_size=30),
    at_once=st.booleans(),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_excluded_samples_come_no_more_and_all_others_once(
    make_case: Any, shape: dict[str, Any], stop: int, excluded: set[int], at_once: bool, worlds: tuple[int, int]
) -> None:
    case = make_case({**shape, "drop_last": False})
    ids = {i for i in excluded if i < case.size}

    def run(rank: int, world: int) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
        loader = case.loader(rank, world)
        iterator = iter(loader)
        before = [batch for _, batch in zip(range(stop), iterator, strict=False)]
        if loader.epoch:
            return before, {}, []
        loader.exclude(ids, at_once=at_once)
        return before, loader.state_dict(), list(iterator)

    ranks = [run(rank, worlds[0]) for rank in range(worlds[0])]
    before = case.sample_ids([batch for got in ranks for batch in got[0]])
    after = case.sample_ids([batch for got in ranks for batch in got[2]])
    if not ranks[0][1]:
        return
    if not at_once:
        assert sorted(before + after) == list(range(case.size))
    else:
        assert len(before + after) == len(set(before + after))
        assert set(range(case.size)) - set(before + after) <= ids
        if not case.packed:
            assert not ids & set(after)
    assert len({json.dumps(got[1]) for got in ranks}) == 1

    def resumed(rank: int, world: int) -> DistributedLoader:
        loader = case.loader(rank, world)
        loader.load_state_dict(json.loads(json.dumps(ranks[0][1])))
        return loader

    rest = [list(got[2]) for got in ranks]
    assert epoch_of(resumed, worlds[1]) == [joined(list(shares), worlds[0]) for shares in zip(*rest, strict=True)]
    following = resumed(0, 1)
    following.reshuffle(1)
    assert sorted(case.sample_ids(list(following))) == [i for i in range(case.size) if i not in ids]


@examples
@given(shape=shapes, stop=st.integers(0, 12), batch_size=st.integers(1, 20), again=st.integers(0, 5))
def test_another_batch_size_goes_on_with_the_very_next_sample(
    make_case: Any, shape: dict[str, Any], stop: int, batch_size: int, again: int
) -> None:
    case = make_case({**shape, "drop_last": False})
    loader = case.loader()
    rows = [row for batch in epoch_of(case.loader, 1) for row in batch]
    got = [row for _, batch in zip(range(stop), loader, strict=False) for row in joined([batch], 1)]
    state = loader.state_dict()
    other = case.loader(batch_size=batch_size)
    if batch_size != case.batch_size:
        with pytest.raises(ConfigError, match=rf"batch_size: got {batch_size}, expected {case.batch_size}"):
            other.load_state_dict(state)
    other.load_state_dict(state, allow={"batch_size"})
    if other.epoch:
        return
    got += [row for _, batch in zip(range(again), other, strict=False) for row in joined([batch], 1)]
    if not other.epoch:  # and resumed once more, at the new size
        third = case.loader(batch_size=batch_size)
        third.load_state_dict(json.loads(json.dumps(other.state_dict())))
        got += [row for batch in third for row in joined([batch], 1)]
    assert got == rows


def test_every_epoch_has_an_order_of_its_own_and_the_same_every_time(stores: dict[int, BlockManager]) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = DistributedLoader(stores[203], 10, seed)
        loader.reshuffle(epoch)
        return [int(i) for batch in loader for i in batch["sample_ids"]]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert all(one != other for index, one in enumerate(orders) for other in orders[:index])
    assert order(0, 1) == orders[1]


def test_what_shapes_the_batches_is_refused_by_name_when_it_changes(
    stores: dict[int, BlockManager], tokenizer: Tokenizer
) -> None:
    state = DistributedLoader(stores[50], 4, 1, tokenizer=tokenizer, sequence_length=LENGTH).state_dict()
    other = train_tokenizer(TEXTS[:5], vocab_size=290)
    for changes, field in (
        ({"seed": 2}, "seed: got 2, expected 1"),
        ({"batch_size": 5}, "batch_size: got 5, expected 4"),
        ({"order": "shuffled"}, "order: got 'shuffled'"),
        ({"drop_last": True}, "drop_last: got True"),
        ({"sequence_length": 32}, "sequence_length: got 32, expected 16"),
        ({"packing": "pad"}, "packing: got 'pad', expected 'concatenate'"),
        ({"tokenizer": other}, r"tokenizer: got 'sha256.* \(tokenizer is its files, .* the version of the library"),
        ({"dataset": stores[7]}, r"dataset_id: got 'sha256.* \(dataset_id is the source's files .*fingerprint is"),
    ):
        wanted = {"dataset": stores[50], "batch_size": 4, "seed": 1, "tokenizer": tokenizer, "sequence_length": LENGTH}
        with pytest.raises(ConfigError, match=f"the state belongs to other batches: .*{field}"):
            DistributedLoader(**{**wanted, **changes}).load_state_dict(state)
    with pytest.raises(ConfigError, match="has version 99, expected 1"):
        DistributedLoader(stores[50], 4).load_state_dict({**state, "version": 99})
    with pytest.raises(ConfigError, match="not a loader state"):
        DistributedLoader(stores[50], 4).load_state_dict({"version": 1})
    with pytest.raises(ConfigError, match=r"not a loader state \(ValueError: step below 0\)"):
        DistributedLoader(stores[50], 4).load_state_dict({**state, "step": -3})
    with pytest.raises(ConfigError, match=r"allow=\['seed'\] cannot be"):
        DistributedLoader(stores[50], 4).load_state_dict(state, allow={"seed"})


def test_settings_that_cannot_work_are_refused(stores: dict[int, BlockManager], tokenizer: Tokenizer) -> None:
    for chosen, told in (
        ({"batch_size": 0}, "batch_size=0 holds no sample"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not in a world of 2"),
        ({"order": "random"}, "order='random' is unknown"),
        ({"tokenizer": tokenizer}, "tokenizer and sequence_length belong together"),
        ({"fields": ("ids",)}, "fields ids are unknown"),
        ({"packing": "loose"}, "packing='loose' is unknown: expected one of concatenate, best-fit"),
        ({"learn": "user"}, "learn='user' is unknown"),
        ({"learn": "assistant"}, "learn='assistant' needs a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=told):
            DistributedLoader(stores[7], **{"batch_size": 1, **chosen})
    loader = DistributedLoader(stores[7], 2)
    with pytest.raises(ConfigError, match="samples 3 to 7 are not all in 0 to 6"):
        loader.exclude([3, 7])
    with pytest.raises(ConfigError, match="epoch 0 has no batch 4: its batches are 0 to 3"):
        loader.batch(0, 4)
    with pytest.raises(IndexError):
        loader[4]


def test_a_loader_goes_to_another_process_as_it_stands(stores: dict[int, BlockManager], tokenizer: Tokenizer) -> None:
    for more in ({}, {"tokenizer": tokenizer, "sequence_length": LENGTH}):
        loader = DistributedLoader(stores[203], 8, **more)
        next(iter(loader))
        copy = pickle.loads(pickle.dumps(loader))  # noqa: S301 - our own
        assert [batch["sample_ids"].tolist() for batch in copy] == [batch["sample_ids"].tolist() for batch in loader]


def test_a_tokenizer_can_be_named_by_its_file(
    tmp_path: Path, stores: dict[int, BlockManager], tokenizer: Tokenizer
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.definition)
    by_name = DistributedLoader(stores[50], 4, tokenizer=tmp_path / "tokenizer.json", sequence_length=LENGTH)
    by_hand = DistributedLoader(stores[50], 4, tokenizer=tokenizer, sequence_length=LENGTH)
    assert [batch["input_ids"].tolist() for batch in by_name] == [batch["input_ids"].tolist() for batch in by_hand]
    assert by_name.tokenizer is not None
    assert by_name.tokenizer.engine == "gigatoken"


@pytest.mark.parametrize("packed", [False, True])
def test_an_iteration_ends_when_another_begins_and_the_place_is_not_lost(
    stores: dict[int, BlockManager], tokenizer: Tokenizer, packed: bool
) -> None:
    more: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": LENGTH} if packed else {}
    loader = DistributedLoader(stores[203], 7, **more)
    older = iter(loader)
    next(older)
    assert len(list(loader)) > 1
    assert (loader.epoch, loader.step) == (1, 0)
    with pytest.raises(PenstockError, match="another iteration over this loader has begun"):
        next(older)  # a batch of epoch 0, which would be counted in epoch 1
    assert (loader.epoch, loader.step) == (1, 0)
    with pytest.raises(PenstockError, match="another iteration over this loader has begun"):
        list(zip(loader, loader, strict=True))


def test_a_cache_that_holds_other_tokens_is_refused(stores: dict[int, BlockManager], tokenizer: Tokenizer) -> None:
    blocks, other = stores[203], train_tokenizer(TEXTS, vocab_size=280)

    def first(cache: TokenCache, **more: Any) -> dict[str, Any]:
        return next(iter(DistributedLoader(blocks, 7, tokenizer=tokenizer, sequence_length=16, cache=cache, **more)))

    assert len(first(TokenCache(blocks, tokenizer))["input_ids"])
    chat = ChatFormat(tokenizer, "plain")
    wrong: list[tuple[str, TokenCache, dict[str, Any]]] = [
        ("data set: got", TokenCache(stores[50], tokenizer), {}),
        ("tokenizer: got", TokenCache(blocks, other), {}),
        ("learn: got 'all', expected 'assistant'", TokenCache(blocks, tokenizer), {"learn": "assistant"}),
        ("learn: got 'assistant', expected 'all'", TokenCache(blocks, tokenizer, chat=chat), {}),
        (
            "chat template: got",
            TokenCache(blocks, tokenizer, chat=chat),
            {"learn": "assistant", "chat_template": "{{ messages }}"},
        ),
    ]
    for message, cache, more in wrong:
        with pytest.raises(ConfigError, match=f"holds other tokens than this loader feeds: {message}"):
            first(cache, **more)


def test_a_store_that_still_grows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nbad\n')
    with pytest.raises(Exception, match="not JSON"):
        ingest(tmp_path / "a.jsonl", tmp_path / "store", 1)
    with pytest.raises(BlockStoreError, match="is not complete, and this plan needs all of it"):
        list(DistributedLoader(tmp_path / "store", 1))


def test_counts_of_sequences_are_refused_until_all_is_tokenised(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    ingest(tmp_path / "a.jsonl", tmp_path / "store", 1)
    loader = DistributedLoader(tmp_path / "store", 1, tokenizer=tokenizer, sequence_length=LENGTH)
    with pytest.raises(ConfigError, match="1 of 1 chunks are not: run `penstock tokenize`, or iterate"):
        _ = loader.batches_per_epoch
    assert len(list(loader)) == loader.batches_per_epoch


def test_a_damaged_block_reaches_whoever_iterates(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    ingest(tmp_path / "a.jsonl", tmp_path / "store", 40)
    path = tmp_path / "store/blocks/block_00003.jsonl"
    path.write_bytes(path.read_bytes().replace(b"word", b"sord", 1))
    with pytest.raises(BlockStoreError, match="block_00003"):
        list(DistributedLoader(tmp_path / "store", 8))


def test_no_thread_stays_behind(stores: dict[int, BlockManager], tokenizer: Tokenizer) -> None:
    import threading

    def feeding() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "penstock feed"]

    for more in ({}, {"tokenizer": tokenizer, "sequence_length": LENGTH}):
        iterator = iter(DistributedLoader(stores[203], 2, **more))
        next(iterator)
        iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert feeding() == []
        list(DistributedLoader(stores[203], 2, **more))
        assert feeding() == []


@pytest.mark.parametrize("world", [4, 3])
def test_ten_thousand_and_seven_samples_stopped_at_step_151_are_learned_once(
    tmp_path: Path, tokenizer: Tokenizer, world: int
) -> None:
    size = 10_007
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"text": "sample %d"}\n' % number for number in range(size)))
    ingest(tmp_path / "a.jsonl", tmp_path / "store", 1000)
    packed: dict[str, Any] = {"tokenizer": tokenizer, "sequence_length": LENGTH}
    for more in ({}, packed):
        before: list[Any] = []
        state: dict[str, Any] = {}
        for rank in range(4):
            loader = DistributedLoader(tmp_path / "store", 24, 5, rank, 4, **more)
            before += [batch for _, batch in zip(range(151), loader, strict=False)]
            state = json.loads(json.dumps(loader.state_dict()))
        after = []
        for rank in range(world):
            loader = DistributedLoader(tmp_path / "store", 24, 5, rank, world, **more)
            loader.load_state_dict(state)
            after.append(list(loader))
        assert len({len(batches) for batches in after}) == 1
        ids = [int(i) for batch in [*before, *(b for batches in after for b in batches)] for i in batch["sample_ids"]]
        assert sorted(ids) == list(range(size))


def test_more_ranks_than_rows_of_a_batch_are_told_of(
    stores: dict[int, BlockManager], caplog: pytest.LogCaptureFixture
) -> None:
    DistributedLoader(stores[SIZES[-1]], 4, 0, 0, 4)
    assert not caplog.messages
    DistributedLoader(stores[SIZES[-1]], 4, 0, 0, 6)
    assert caplog.messages == ["batch_size=4 is that of all 6 ranks together: ranks from 4 on never have a row"]


def test_several_data_sets_are_refused_where_they_are_no_mix(stores: dict[int, BlockManager]) -> None:
    for several in ({"a": stores[SIZES[-1]]}, [stores[SIZES[-1]], stores[SIZES[-1]]]):
        with pytest.raises(ConfigError, match=r"expected one, or penstock\.Mix of several"):
            DistributedLoader(several, 4)  # pyright: ignore[reportArgumentType]


def test_samples_excluded_at_once_in_the_last_window_are_told_to_come_still(
    stores: dict[int, BlockManager], tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DistributedLoader(stores[SIZES[-1]], 2, tokenizer=tokenizer, sequence_length=16)
    list(loader)
    loader.exclude([1], at_once=True)  # there are more windows to come
    assert not caplog.messages
    loader.go_to(loader.batches_per_epoch - 1)
    loader.exclude([2], at_once=True)
    assert caplog.messages == [
        "the last window of epoch 1 is under way, and packed: 1 excluded samples may still come in it"
    ]

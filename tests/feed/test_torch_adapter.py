"""Batches as tensors: the same ones, and a state that counts what was handed out and nothing that was staged."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feed.stores import LENGTH, SIZE, TOKENIZER, make_loader, make_small_store, plain, small_chunks
from penstock.errors import BlockStoreError, ConfigError, PenstockError
from penstock.feed import DistributedLoader
from penstock.feed.mix import Mix
from penstock.feed.rows import FIELDS
from penstock.feed.torch_adapter import TorchBatches, rank_and_world_size
from penstock.feed.torch_tensors import as_tensor

examples = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DEVICES = [None, *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


def feeding() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "penstock feed"]


# -- the same batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_are_the_loaders_as_tensors(store: Path, packed: bool, ahead: int, device: str | None) -> None:
    expected = [plain(batch) for batch in make_loader(store, packed=packed)]
    adapted = TorchBatches(make_loader(store, packed=packed), ahead=ahead, device=device)
    got = list(adapted)
    assert [plain(batch) for batch in got] == expected
    assert (adapted.epoch, adapted.step) == (1, 0)
    for batch in got:
        arrays = {name: value for name, value in batch.items() if not isinstance(value, list)}
        assert {value.dtype for value in arrays.values()} == {torch.int64}
        assert batch.keys() == expected[0].keys()
        assert {value.device.type for value in arrays.values()} == {device or "cpu"}
    if packed:
        assert got[0]["input_ids"].shape == (7, LENGTH)
    else:
        assert isinstance(got[0]["text"][0], str)
    assert feeding() == []


@pytest.mark.parametrize("packing", ["concatenate", "best-fit", "pad", "ragged"])
def test_every_packing_and_every_field_goes_through(store: Path, packing: Any) -> None:
    def make() -> DistributedLoader:
        fields = tuple(name for name in FIELDS if packing != "ragged" or name != "attention_mask")
        return make_loader(store, packed=True, packing=packing, fields=fields)

    expected, adapted = [plain(batch) for batch in make()], TorchBatches(make())
    got = list(adapted)
    assert [plain(batch) for batch in got] == expected
    assert {batch["input_ids"].dtype for batch in got} == {torch.int64}
    assert {batch["cu_seqlens"].dtype for batch in got} == {torch.int32}, "as the kernels want it"


@pytest.mark.parametrize("packed", [False, True])
def test_a_mix_goes_through_with_its_state(tmp_path: Path, store: Path, packed: bool) -> None:
    other = make_small_store(tmp_path)
    more = {"tokenizer": TOKENIZER, "sequence_length": LENGTH} if packed else {}
    for path in (store, other):
        make_loader(path, packed=True).token_cache.build()

    def make() -> DistributedLoader:
        return DistributedLoader(Mix({"one": store, "two": other}, epochs={"one": 1, "two": 2}), 7, 3, **more)

    whole, alone = [plain(batch) for batch in make()], make()
    adapted, got = TorchBatches(make(), ahead=3), []
    for batch, wanted in zip(adapted, alone, strict=False):
        got.append(plain(batch))
        assert plain(batch) == plain(wanted)
        assert adapted.state_dict() == alone.state_dict()
        if len(got) == 9:
            break
    again = TorchBatches(make())
    again.load_state_dict(adapted.state_dict())
    assert got + [plain(batch) for batch in again] == whole
    with pytest.raises(ConfigError, match="cannot be told where it stands"):
        make().go_to(1)


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_without_samples_have_empty_tensors(store: Path, packed: bool) -> None:
    ranks = [TorchBatches(make_loader(store, 2, packed=packed, rank=rank, world_size=5)) for rank in range(5)]
    shares = [list(rank) for rank in ranks]
    assert len({len(share) for share in shares}) == 1
    assert all(batch["sample_ids"].dtype == torch.int64 for share in shares for batch in share)
    assert all(len(batch["sample_ids"]) == 0 for batch in shares[4])
    if packed:
        assert shares[4][0]["input_ids"].shape == (0, LENGTH)
    ids = sorted(int(i) for share in shares for batch in share for i in batch["sample_ids"])
    assert ids == list(range(SIZE))


def test_a_device_that_is_neither_cpu_nor_cuda_is_given_its_batches(store: Path) -> None:
    batches = list(TorchBatches(make_loader(store, packed=True), device="meta"))
    assert {value.device.type for batch in batches for value in batch.values()} == {"meta"}
    with pytest.raises(ConfigError, match="pin_memory"):
        iter(TorchBatches(make_loader(store), device="meta", pin_memory=True))


def test_epochs_follow_each_other(store: Path) -> None:
    adapted, loader = TorchBatches(make_loader(store)), make_loader(store)
    for _ in range(3):
        assert [plain(batch) for batch in adapted] == [plain(batch) for batch in loader]
    assert adapted.epoch == 3
    assert len(adapted) == len(loader)


# -- the state ---------------------------------------------------------------------------------------------------------


@examples
@given(packed=st.booleans(), ahead=st.integers(0, 4), taken=st.integers(0, 12), world=st.integers(1, 3))
def test_a_state_counts_what_was_handed_out(store: Path, packed: bool, ahead: int, taken: int, world: int) -> None:
    alone, adapted = make_loader(store, packed=packed), TorchBatches(make_loader(store, packed=packed), ahead=ahead)
    expected, iterator = iter(alone), iter(adapted)
    assert adapted.state_dict() == alone.state_dict()
    for _ in range(taken):
        assert plain(next(iterator)) == plain(next(expected))
        assert adapted.state_dict() == alone.state_dict()
        assert (adapted.epoch, adapted.step) == (alone.epoch, alone.step)
    state = json.loads(json.dumps(adapted.state_dict()))
    rest = sorted(int(i) for batch in expected for i in batch["sample_ids"])
    others = [TorchBatches(make_loader(store, packed=packed, rank=r, world_size=world)) for r in range(world)]
    for other in others:
        other.load_state_dict(state)
    assert sorted(int(i) for other in others for batch in other for i in batch["sample_ids"]) == rest


@pytest.mark.parametrize("packed", [False, True])
def test_an_iteration_that_ends_early_gives_back_what_was_staged(store: Path, packed: bool) -> None:
    adapted = TorchBatches(make_loader(store, packed=packed), ahead=4)
    got: list[dict[str, Any]] = []
    while adapted.epoch == 0:
        for batch, _ in zip(adapted, range(3), strict=False):
            got.append(plain(batch))
            assert adapted.loader.epoch <= 1
        if adapted.epoch == 0:
            assert feeding() == []
            assert adapted.loader.state_dict() == adapted.state_dict()
    # `zip` takes one more than it gives, so a batch in four is handed out and dropped; none of the others is lost.
    expected = [plain(batch) for batch in make_loader(store, packed=packed)]
    assert got == [batch for place, batch in enumerate(expected) if place % 4 != 3]


def test_breaking_out_and_going_on_loses_nothing(store: Path) -> None:
    adapted, got = TorchBatches(make_loader(store), ahead=3), []
    while adapted.epoch == 0:
        for batch in adapted:
            got.append(plain(batch))
            if len(got) % 4 == 0:
                break
    assert got == [plain(batch) for batch in make_loader(store)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ahead", [0, 3])
def test_excluding_in_the_middle_goes_on_as_the_loader_does(store: Path, packed: bool, ahead: int) -> None:
    def batches(source: DistributedLoader | TorchBatches) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(source):
            yield plain(batch)
            if number == 2:
                source.exclude(range(0, SIZE, 3), at_once=True)
            if number == 4:
                source.exclude(range(1, SIZE, 3))

    adapted, loader = TorchBatches(make_loader(store, packed=packed), ahead=ahead), make_loader(store, packed=packed)
    for _ in range(2):
        assert list(batches(adapted)) == list(batches(loader))
    assert adapted.state_dict() == loader.state_dict()


def test_going_elsewhere_in_the_middle_does_as_the_loader_does(store: Path) -> None:
    def batches(source: DistributedLoader | TorchBatches) -> Iterator[dict[str, Any]]:
        states = []
        for number, batch in enumerate(source):
            yield plain(batch)
            states.append(source.state_dict())
            if number == 5:
                source.load_state_dict(states[1])
            if number == 8:
                source.reshuffle(0)
            if number == 10:
                source.reshuffle(4)

    adapted, loader = TorchBatches(make_loader(store)), make_loader(store)
    assert list(batches(adapted)) == list(batches(loader))
    assert (adapted.epoch, adapted.step) == (loader.epoch, loader.step) == (4, 0)


def test_one_iteration_at_a_time(store: Path) -> None:
    adapted = TorchBatches(make_loader(store))
    first = iter(adapted)
    one = plain(next(first))
    second = iter(adapted)
    assert [one, plain(next(second))] == [plain(batch) for batch, _ in zip(make_loader(store), range(2), strict=False)]
    with pytest.raises(PenstockError, match="another iteration over these batches has begun"):
        next(first)
    assert len(list(second)) == len(adapted) - 2


def test_a_state_of_other_batches_is_refused(store: Path) -> None:
    state = TorchBatches(make_loader(store, 7)).state_dict()
    with pytest.raises(ConfigError, match="batch_size: got 8, expected 7"):
        TorchBatches(make_loader(store, 8)).load_state_dict(state)
    other = TorchBatches(make_loader(store, 8))
    other.load_state_dict(state, allow={"batch_size"})


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_reaches_whoever_iterates_behind_the_batches_before_it(tmp_path: Path, ahead: int) -> None:
    store = make_small_store(tmp_path)
    loader = make_loader(store, order="sequential")
    path = store / "blocks/block_00003.jsonl"
    path.write_bytes(path.read_bytes().replace(b"word", b"sord", 1))
    adapted = TorchBatches(loader, ahead=ahead)
    got: list[int] = []

    def take_all() -> None:
        for batch in adapted:
            got.extend(batch["sample_ids"].tolist())

    with pytest.raises(BlockStoreError, match="block_00003"):
        take_all()
    assert got == list(range(len(got)))
    assert adapted.step * 7 == len(got)
    assert feeding() == []


def test_settings_that_cannot_work_are_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match="ahead=-1 cannot be"):
        TorchBatches(make_loader(store), ahead=-1)
    if not torch.cuda.is_available():
        for adapted in (
            TorchBatches(make_loader(store), device="cuda"),
            TorchBatches(make_loader(store), pin_memory=True),
        ):
            with pytest.raises(ConfigError, match="needs CUDA, and torch finds no such device: name another"):
                iter(adapted)


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
def test_ids_become_int64_and_keep_their_values(dtype: type[np.generic]) -> None:
    array = np.array([[0, 1, np.iinfo(dtype).max]], dtype=dtype)  # pyright: ignore
    tensor = as_tensor(array)
    assert tensor.dtype == torch.int64
    assert tensor.tolist() == array.tolist()
    assert as_tensor(torch.from_numpy(array.copy())).tolist() == array.tolist()


def test_memory_is_shared_where_nothing_has_to_change() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert as_tensor(array).data_ptr() == array.ctypes.data
    assert as_tensor(array[:, ::2]).tolist() == [[0, 2], [3, 5]]
    array.flags.writeable = False
    assert as_tensor(array).data_ptr() != array.ctypes.data, "what must not be written is copied"


def test_other_things_stay_what_they_are() -> None:
    assert as_tensor(["a"]) == ["a"]
    assert as_tensor(np.array([True])).dtype == torch.bool
    assert as_tensor(np.array([1], dtype=np.int32)).dtype == torch.int32
    assert as_tensor(np.array([0.5], dtype=np.float32)).dtype == torch.float32
    assert isinstance(as_tensor(np.array(["a"])), np.ndarray)
    assert as_tensor(np.empty((0, 4), dtype=np.uint16)).shape == (0, 4)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_a_loader_that_is_not_told_its_rank_is_refused_under_a_launcher(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (make_loader(store).rank, make_loader(store).world_size) == (0, 1)
    assert rank_and_world_size() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigError, match=r"RANK=1 of WORLD_SIZE=4, and the loader was not told: give rank=1 and world_"
    ):
        make_loader(store)
    assert rank_and_world_size() == (1, 4)
    rank, world_size = rank_and_world_size()
    assert DistributedLoader(store, 8, 3, rank, world_size).rank == 1
    assert DistributedLoader(store, 8, 3, 0, 1).world_size == 1, "said aloud, one process may have all of it"
    with pytest.raises(ConfigError, match="rank=1 and world_size=None belong together"):
        make_loader(store, rank=1)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="WORLD_SIZE='four': expected two numbers"):
        make_loader(store)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert make_loader(store).world_size == 1


def test_waits_are_those_of_the_consumer(store: Path) -> None:
    adapted = TorchBatches(make_loader(store))
    count = len(list(adapted))
    told = adapted.timings()
    assert told["batches"] == count
    assert {"wait_p50_s", "wait_p99_s", "wait_share", "fetch_s", "decode_s", "queue_s"} <= told.keys()

"""A loader in a torch DataLoader: item k is batch k, whoever makes it; and the state stays in the main process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import equipment.forks  # noqa: F401 - which says what a fork server imports
from feed.stores import SIZE, make_loader, make_small_store, plain, small_chunks
from penstock.errors import ConfigError
from penstock.feed import DistributedLoader
from penstock.feed.torch_adapter import TorchBatches
from penstock.feed.torch_workers import WorkerBatches

METHODS = ["forkserver", "fork"]
"""The first hands a loader over as it does to a spawned process, and is quick: the server has torch imported."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = make_small_store(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        make_loader(store, packed=True).token_cache.build()
    return store


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


def settled(loader: DistributedLoader) -> DistributedLoader:
    """A loader that has looked at its data before it goes to other processes."""
    _ = loader.batches_per_epoch
    return loader


def loaded(loader: DistributedLoader, workers: int, method: str, **more: Any) -> DataLoader[Any]:
    if workers:
        more = {"multiprocessing_context": method, "timeout": 60, **more}
    return DataLoader(loader, batch_size=None, shuffle=False, num_workers=workers, **more)  # pyright: ignore


def expected(store: Path, **more: Any) -> list[dict[str, Any]]:
    return [plain(batch) for batch in make_loader(store, **more)]


# -- as it is ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "method"), [(0, ""), (1, "fork"), (3, "fork"), (1, "spawn"), (3, "forkserver")])
def test_any_number_of_workers_gives_the_loaders_batches(store: Path, workers: int, method: str) -> None:
    packed = workers != 1
    loader = settled(make_loader(store, packed=packed))
    items = loaded(loader, workers, method)
    assert len(items) == len(loader)
    assert [plain(batch) for batch in items] == expected(store, packed=packed)
    assert (loader.epoch, loader.step) == (0, 0), "items are asked for, batches are handed out"


@pytest.mark.parametrize("method", METHODS)
def test_workers_that_stay_give_every_pass_the_same(store: Path, method: str) -> None:
    items = loaded(settled(make_loader(store)), 2, method, persistent_workers=True)
    assert [plain(batch) for batch in items] == [plain(batch) for batch in items] == expected(store)


def test_the_next_epoch_is_seen_by_workers_that_start_with_it(store: Path) -> None:
    loader = settled(make_loader(store))
    items = loaded(loader, 2, "fork")
    list(items)
    loader.reshuffle(1)
    other = make_loader(store)
    other.reshuffle(1)
    assert [plain(batch) for batch in items] == [plain(batch) for batch in other]


def test_forked_workers_do_not_mind_that_their_parent_was_feeding(store: Path) -> None:
    loader = settled(make_loader(store, packed=True))
    running = iter(loader)
    next(running)
    assert [plain(batch) for batch in loaded(loader, 2, "fork")] == expected(store, packed=True)


def test_ranks_in_workers_make_the_global_batch(store: Path) -> None:
    ranks = [loaded(settled(make_loader(store, rank=rank, world_size=2)), 1, "fork") for rank in range(2)]
    for shares, whole in zip(zip(*ranks, strict=True), expected(store), strict=True):
        ids = [share["sample_ids"].tolist() for share in shares]
        assert sorted(ids[0] + ids[1]) == sorted(whole["sample_ids"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_stateful_data_loader_goes_on_where_it_was(store: Path, packed: bool, workers: int) -> None:
    def items() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            settled(make_loader(store, packed=packed)),  # pyright: ignore[reportArgumentType]
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )

    first, second = items(), items()
    iterator = iter(first)
    got = [plain(next(iterator)) for _ in range(5)]
    second.load_state_dict(first.state_dict())
    assert got + [plain(batch) for batch in second] == expected(store, packed=packed)


# -- with the state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("workers", "method"), [(0, "spawn"), (2, "fork"), (2, "forkserver"), (1, "spawn")])
def test_worker_batches_stand_where_the_loader_would(store: Path, packed: bool, workers: int, method: Any) -> None:
    alone = make_loader(store, packed=packed)
    batches = WorkerBatches(settled(make_loader(store, packed=packed)), workers, start_method=method, timeout_s=60)
    for batch, wanted in zip(batches, alone, strict=True):
        assert plain(batch) == plain(wanted)
        assert batches.state_dict() == alone.state_dict()
    assert (batches.epoch, batches.step) == (1, 0)
    assert batches.state_dict() == alone.state_dict()


@pytest.mark.parametrize("packed", [False, True])
def test_a_state_taken_with_workers_goes_on_without_and_the_other_way_round(store: Path, packed: bool) -> None:
    first = TorchBatches(WorkerBatches(settled(make_loader(store, packed=packed)), 2, start_method="fork"), ahead=2)
    got = [plain(batch) for batch, _ in zip(first, range(5), strict=False)]
    got = got[:5]
    second = make_loader(store, packed=packed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.step == 6, "zip took one more than it gave"
    for batch in second:
        got.append(plain(batch))
        if second.step == 11:
            break
    third = TorchBatches(WorkerBatches(settled(make_loader(store, packed=packed)), 1, start_method="fork"))
    third.load_state_dict(second.state_dict())
    got += [plain(batch) for batch in third]
    whole = expected(store, packed=packed)
    assert got == whole[:5] + whole[6:]


def test_excluding_in_the_middle_reaches_the_workers(store: Path) -> None:
    def batches(source: DistributedLoader | WorkerBatches) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(source):
            yield plain(batch)
            if number == 3:
                source.exclude(range(0, SIZE, 2), at_once=True)

    workers = WorkerBatches(settled(make_loader(store)), 2, start_method="fork", timeout_s=60)
    assert list(batches(workers)) == list(batches(make_loader(store)))


def test_batches_without_numbers_are_refused(store: Path, tmp_path: Path) -> None:
    fresh = make_small_store(tmp_path)
    with pytest.raises(ConfigError, match="run `penstock tokenize`, or iterate"):
        next(iter(WorkerBatches(make_loader(fresh, packed=True), 0)))
    resized = make_loader(store, 5, packed=True)
    state = make_loader(store, 7, packed=True)
    next(iter(state))
    resized.load_state_dict(state.state_dict(), allow={"batch_size"})
    with pytest.raises(ConfigError, match="packed batches have no numbers until the next: iterate to its end"):
        next(iter(WorkerBatches(resized, 0)))
    with pytest.raises(ConfigError, match="num_workers=-1 cannot be"):
        WorkerBatches(make_loader(store), -1)


def test_going_to_a_step_is_standing_there(store: Path) -> None:
    for packed in (False, True):
        loader, other = make_loader(store, packed=packed), make_loader(store, packed=packed)
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
        whole = expected(store, packed=packed)
        for step in (0, 1, 5, len(whole) - 1, len(whole)):
            other.go_to(step)
            assert other.step == step
            assert [plain(batch) for batch in other] == whole[step:]
            other.reshuffle(0)
            other.go_to(step)
            assert other.state_dict() == states[step] or step == len(whole)
            other.reshuffle(5)
            other.reshuffle(0)
        with pytest.raises(ConfigError, match="is not in an epoch of"):
            other.go_to(len(whole) + 1)

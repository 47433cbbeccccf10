"""A forked process that iterates a loader anew gets its batches or an error: never a lock that nobody frees."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from equipment.servers import S3Server
from pages.making import batches_of, choose, digest_of, fill, loader_of
from penstock import R2DatasetLoader
from penstock.errors import PenstockError
from penstock.pages import PagedDataset, places, tokenizers, tokens
from penstock.storage import EndpointStorage, ObjectStorage, open_storage


@contextmanager
def all_held(loader: R2DatasetLoader) -> Iterator[None]:
    """Every lock on the way to a page held, as threads may have them while another one forks."""
    dataset = loader.dataset
    dataset._turns.update({path: threading.Lock() for path in ("web/0000.parquet", "books/0000.parquet")})
    locks: list[Any] = [loader._lock, loader._kept._lock, dataset._lock, dataset._looking, *dataset._turns.values()]
    locks += [tokens._opening, places._lock, tokenizers._lock]
    if isinstance(dataset.storage, EndpointStorage):
        storage = dataset.storage
        locks += [storage._rotation._lock, storage._allowance._lock, storage._lanes._lock]
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


def holds_in_a_fork(action: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        signal.alarm(60)  # which ends one that hangs
        held = False
        try:
            held = action()
        except BaseException:  # noqa: BLE001 - told, and the child must not go on
            traceback.print_exc()
        finally:
            os._exit(0 if held else 1)
    return os.waitpid(child, 0)[1] == 0


def test_no_lock_comes_along(dataset: Path) -> None:
    loader = loader_of(choose(dataset), dataset=str(dataset))
    expected, first = digest_of(loader), loader[0].tolist()
    with all_held(loader):
        assert holds_in_a_fork(lambda: digest_of(loader) == expected)
        assert holds_in_a_fork(lambda: loader[0].tolist() == first)
        assert holds_in_a_fork(lambda: len(choose(str(dataset))) == 9)
    assert digest_of(loader) == expected


def test_children_fork_while_threads_iterate(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(R2DatasetLoader, "TOKEN_CACHE_BYTES", 0)
    loader = loader_of(choose(dataset), dataset=str(dataset))
    expected, ended = digest_of(loader), threading.Event()

    def iterate() -> None:
        while not ended.is_set():
            digest_of(loader_of(choose(str(dataset)), dataset=str(dataset)))

    threads = [threading.Thread(target=iterate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(holds_in_a_fork(lambda: digest_of(loader) == expected) for _ in range(10))
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("endpoints", [1, 3])
def test_object_stores_are_refused_though_their_locks_are_held(bucket: str, s3: S3Server, endpoints: int) -> None:
    fill(open_storage(bucket))
    options = {"endpoint": s3.url, "access_key_id": "reader", "secret_access_key": "reader-secret"}
    stores = [ObjectStorage.from_url(bucket, options) for _ in range(endpoints)]
    dataset = PagedDataset(EndpointStorage(stores) if endpoints > 1 else stores[0])
    loader = loader_of(choose(dataset), dataset=dataset)
    expected = batches_of(loader)

    def is_told() -> bool:
        try:
            batches_of(loader)
        except PenstockError as error:
            return "before it was forked" in str(error)
        return False

    with all_held(loader):
        assert holds_in_a_fork(is_told)
    assert batches_of(loader) == expected

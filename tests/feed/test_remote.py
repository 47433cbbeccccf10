"""A loader over a block store in a bucket gives the batches of the same store on a disk; tokens stay on this disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from equipment.buckets import use_key
from equipment.proxy import faulty_proxy
from equipment.servers import S3Server
from feed.stores import make_loader, make_small_store, plain, small_chunks
from penstock.blocks import ingest
from penstock.feed import DistributedLoader

WAYS: dict[str, dict[str, Any]] = {
    "texts": {"packed": False},
    "packed": {"packed": True},
    "texts of single samples": {"packed": False, "order": "shuffled"},
}


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_chunks(monkeypatch)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return make_small_store(tmp_path)


@pytest.fixture
def store(local: Path, bucket: str) -> str:
    ingest(local.parent / "raw.jsonl", bucket, block_size=40)
    return bucket


def batches(loader: DistributedLoader) -> list[dict[str, Any]]:
    return [plain(batch) for batch in loader]


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_those_of_the_same_store_on_a_disk(local: Path, store: str, way: str) -> None:
    assert batches(make_loader(store, **WAYS[way])) == batches(make_loader(local, **WAYS[way]))


def test_tokens_are_kept_in_the_cache_folder_and_the_bucket_is_left_alone(
    store: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, "reader", s3.url)
    loader = make_loader(store, tokenizer=str(tmp_path / "tokenizer.json"), sequence_length=16)
    first = batches(loader)
    folder = loader.token_cache.folder
    assert folder is not None
    assert folder.is_relative_to(tmp_path / "cache" / "tokens")
    with faulty_proxy(s3.url) as proxy:
        use_key(monkeypatch, "reader", proxy.url)
        again = make_loader(store, tokenizer=str(tmp_path / "tokenizer.json"), sequence_length=16)
        assert batches(again) == first
        assert not [path for _, path, _ in proxy.requests if "block_0" in path], "every token is here already"


def test_spawned_workers_make_the_same_batches(store: str) -> None:
    loader = make_loader(store)
    expected = batches(make_loader(store))
    _ = loader.batches_per_epoch  # it has looked at the bucket before it goes elsewhere
    items: Any = DataLoader(  # pyright: ignore[reportCallIssue]
        loader,  # pyright: ignore[reportArgumentType]
        batch_size=None,
        shuffle=False,
        num_workers=2,
        multiprocessing_context="spawn",
        timeout=60,
    )
    assert [plain(batch) for batch in items] == expected


def test_a_state_goes_on_from_a_disk_in_a_bucket(local: Path, store: str) -> None:
    loader = make_loader(local, packed=True)
    whole = batches(loader)
    begun = make_loader(local, packed=True)
    batch = iter(begun)
    taken = [plain(next(batch)) for _ in range(5)]
    moved = make_loader(store, packed=True)
    moved.load_state_dict(begun.state_dict())
    assert taken + batches(moved) == whole


@pytest.mark.usefixtures("quick_retries")
def test_through_trouble_the_batches_are_the_same(
    local: Path, store: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_proxy(s3.url, status=0.2, cut=0.1) as proxy:
        use_key(monkeypatch, "tester", proxy.url)
        assert batches(make_loader(store, packed=True)) == batches(make_loader(local, packed=True))
        assert proxy.made["status"] > 0

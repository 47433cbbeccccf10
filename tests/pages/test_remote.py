"""Pages from an S3 server: what is asked for, through trouble, on several endpoints, and when the server dies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from equipment.buckets import PATIENT, use_key
from equipment.processes import held_open, python
from equipment.proxy import Proxy, faulty_proxy
from equipment.servers import S3Server
from equipment.web import web_server
from pages.making import (
    SIZES,
    TOKENIZER,
    batches_of,
    choose,
    digest_of,
    documents,
    fill,
    loader_of,
    packed,
    shard_bytes,
    texts_of,
)
from penstock import R2DatasetLoader
from penstock.errors import AccessDenied, PageError, StorageError, TransientStoreError
from penstock.pages import PagedDataset, make_index, write_index
from penstock.storage import EndpointStorage, ObjectStorage, open_storage
from penstock.storage.connection import Timeouts
from penstock.storage.retry import Budgets, RetryBudget


@pytest.fixture
def remote(bucket: str) -> str:
    """The URL of the data set."""
    fill(open_storage(bucket))
    return bucket


@pytest.fixture
def no_tokens_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(R2DatasetLoader, "TOKEN_CACHE_BYTES", 0)


def expected_of(pages: Any, rows: int = 37) -> list[Any]:
    return packed(documents(pages, rows), 3, 32)


def at(url: str, proxy: Proxy | str, budgets: Budgets = PATIENT, key: str = "reader") -> ObjectStorage:
    options = {
        "endpoint": proxy if isinstance(proxy, str) else proxy.url,
        "access_key_id": key,
        "secret_access_key": f"{key}-secret",
    }
    return ObjectStorage.from_url(url, options, budgets=budgets, timeouts=Timeouts(connect_s=2.0, read_s=5.0))


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_a_key_that_may_only_read_is_enough(remote: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_key(monkeypatch, "reader", s3.url)
    pages = choose(remote)
    assert batches_of(loader_of(pages)) == expected_of(pages)


def test_a_key_that_may_not_read_is_told_at_once(remote: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_key(monkeypatch, "stranger", s3.url)
    with pytest.raises(AccessDenied):
        choose(remote)


def test_only_the_text_columns_chunks_of_the_rows_are_fetched(bucket: str, s3: S3Server) -> None:
    storage = open_storage(bucket)
    texts = [f"{row} " + "x" * 1000 for row in range(1000)]
    storage.put("web/0.parquet", shard_bytes(texts, group_rows=100, compression="none", use_dictionary=False))
    write_index([storage], make_index(storage)[0])
    with faulty_proxy(s3.url) as proxy:
        loader = loader_of([("web", 250, "train")], dataset=at(bucket, proxy), num_rows_per_page=100)
        assert sum(batch.num_tokens for batch in loader.batches()) > 0
        asked = [
            (method, path.rpartition("/")[2].partition("?")[0], headers) for method, path, headers in proxy.requests
        ]
    assert {method for method, _, _ in asked} == {"GET", "HEAD"}
    assert not [name for _, name, _ in asked if "list-type" in name]
    ranges = [headers["range"] for method, name, headers in asked if method == "GET" and name == "0.parquet"]
    sizes = [
        int(last) - int(first) + 1
        for first, _, last in (asked.removeprefix("bytes=").partition("-") for asked in ranges)
    ]
    assert len(ranges) == 2, "the footer, and two neighbouring row groups' chunks together"
    assert 200_000 < sizes[1] < 215_000, "of a million bytes"


def test_the_index_is_fetched_once_and_again_when_its_etag_changes(remote: str, s3: S3Server) -> None:
    def fetched(proxy: Proxy) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in proxy.requests if method == "GET"]

    with faulty_proxy(s3.url) as proxy:
        first = PagedDataset(at(remote, proxy)).catalog()
        assert sorted(fetched(proxy)) == ["_metadata.yaml", "_shard_sizes.json"]
        again = PagedDataset(at(remote, proxy))
        assert again.catalog().dataset_id == first.dataset_id
        assert len(fetched(proxy)) == 2, "from the cache folder, as another process would"
        storage = open_storage(remote)
        storage.put("web/9999.parquet", shard_bytes(texts_of("web", 5)))
        write_index([storage], make_index(storage)[0])
        assert PagedDataset(at(remote, proxy)).catalog().dataset_id != first.dataset_id
        assert fetched(proxy)[2:] == ["_shard_sizes.json"]


def test_footers_are_fetched_once_for_all_processes(remote: str, s3: S3Server) -> None:
    pages = choose(remote)
    digest_of(loader_of(pages))
    with faulty_proxy(s3.url) as proxy:
        use = PagedDataset(at(remote, proxy))
        for _ in range(2):
            digest_of(loader_of(list(pages), dataset=use, num_rows_per_page=37))
        first = [path for method, path, _ in proxy.requests if method == "GET" and path.endswith(".parquet")]
        again = PagedDataset(at(remote, proxy))
        digest_of(loader_of(list(pages), dataset=again, num_rows_per_page=37))
        second = [path for method, path, _ in proxy.requests if method == "GET" and path.endswith(".parquet")]
    assert first == second == [], "its tokens are here already: only versions are asked for"


# -- other places ------------------------------------------------------------------------------------------------------


def test_a_folder_of_a_web_server_is_a_data_set(dataset: Path) -> None:
    with web_server() as web:
        for path in dataset.rglob("*"):
            if path.is_file():
                web.files[f"some/set/{path.relative_to(dataset).as_posix()}"] = path.read_bytes()
        pages = choose(f"{web.url}/some/set")
        assert list(pages) == list(choose(dataset))
        assert batches_of(loader_of(pages)) == expected_of(pages)


@pytest.fixture
def buckets(remote: str, s3: S3Server, place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """Three endpoints of the environment, the data set below the loader's subfolder in each."""
    monkeypatch.setattr(R2DatasetLoader, "DATASET_SUBFOLDER", place)
    monkeypatch.setattr("penstock.storage.endpoints.Budgets", lambda: PATIENT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    with ExitStack() as stack:
        proxies = [stack.enter_context(faulty_proxy(s3.url)) for _ in range(3)]
        credentials = {"access_key_id": "reader", "secret_access_key": "reader-secret"}
        entries = [
            {"endpoint_url": proxy.url, "name": "data", "credentials": {"read": credentials}} for proxy in proxies
        ]
        monkeypatch.setenv("R2_DATASET_BUCKET_LIST", json.dumps(entries))
        yield proxies


def test_the_environments_buckets_are_read_in_turn(buckets: list[Proxy], dataset: Path) -> None:
    pages = R2DatasetLoader.next_pages(4, 9, "me", 37)
    assert list(pages) == list(choose(dataset)), "the same data set, so the same pages"
    assert batches_of(loader_of(pages)) == expected_of(pages)
    assert all(len(proxy.requests) > 3 for proxy in buckets)


def test_one_bucket_of_the_environment_is_enough(
    remote: str, place: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(R2DatasetLoader, "DATASET_SUBFOLDER", place)
    for name, value in {
        "ENDPOINT_URL": s3.url,
        "BUCKET_NAME": "data",
        "READ_ACCESS_KEY_ID": "reader",
        "READ_SECRET_ACCESS_KEY": "reader-secret",
    }.items():
        monkeypatch.setenv(f"R2_DATASET_{name}", value)
    pages = R2DatasetLoader.next_pages(4, 9, "me", 37)
    assert batches_of(loader_of(pages)) == expected_of(pages)


def test_requests_to_r2_are_signed_for_the_loaders_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_ID", "BUCKET_NAME", "READ_ACCESS_KEY_ID", "READ_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"R2_DATASET_{name}", "a" * 32)
    dataset = R2DatasetLoader._open_dataset(None)
    assert isinstance(dataset.storage, ObjectStorage)
    assert dataset.storage.address.options["region"] == "enam"
    assert dataset.storage.address.prefix == R2DatasetLoader.DATASET_SUBFOLDER


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tokens_kept")
def test_every_page_arrives_exact_through_trouble_and_one_dead_endpoint_of_three(buckets: list[Proxy]) -> None:
    for proxy in buckets:
        proxy.trouble.status, proxy.trouble.cut = 0.2, 0.1
        proxy.trouble.stall, proxy.trouble.stall_s = 0.05, 0.3
    buckets[1].trouble.dead = True
    count = sum(-(-rows // 37) for rows in SIZES.values())
    pages = R2DatasetLoader.next_pages(11, count, "me", 37)
    loader = loader_of(pages)
    assert digest_of(loader) == digest_of(expected_of(pages))
    report = loader.report()
    assert (report["samples"], report["complete"]) == (sum(SIZES.values()), True)
    assert len(set(report["page_digests"])) == count, "no page twice"
    assert buckets[0].made["status"] > 0
    assert buckets[0].made["cut"] > 0
    assert buckets[1].made["dead"] > 0


@pytest.mark.usefixtures("no_tokens_kept")
def test_with_all_endpoints_dead_it_is_an_error_that_names_the_page(remote: str, s3: S3Server) -> None:
    short = RetryBudget(attempts=5, deadline_s=5.0, first_wait_s=0.01, longest_wait_s=0.1)
    budgets = Budgets(metadata=short, data=short)
    with ExitStack() as stack:
        proxies = [stack.enter_context(faulty_proxy(s3.url)) for _ in range(3)]
        storage = EndpointStorage([at(remote, proxy) for proxy in proxies], budgets=budgets)
        pages = choose(storage)
        batches = iter(loader_of(pages, dataset=storage))
        next(batches)
        for proxy in proxies:
            proxy.trouble.dead = True
        with pytest.raises(
            PageError, match=r"page \('\w+', \d+, 'train'\) of \d+ rows cannot be read: .*given up"
        ) as got:
            list(batches)
        assert isinstance(got.value.__cause__, TransientStoreError)
        with pytest.raises(StorageError, match="given up"):
            choose(EndpointStorage([at(remote, proxy) for proxy in proxies], budgets=budgets))


@pytest.mark.usefixtures("no_tokens_kept")
@pytest.mark.parametrize("endpoints", [1, 3])
def test_the_loader_goes_on_when_the_server_was_killed_and_is_back(remote: str, s3: S3Server, endpoints: int) -> None:
    budget = RetryBudget(attempts=1000, deadline_s=90.0, first_wait_s=0.02, longest_wait_s=0.2)
    pages = choose(remote, 23)
    budgets = Budgets(metadata=budget, data=budget)
    one = at(remote, s3.url, budgets)
    storage = one if endpoints == 1 else EndpointStorage([one] * endpoints, budgets=budgets)
    loader = loader_of(list(pages), dataset=storage)
    got = []
    for batch in loader:
        got.append(batch.tolist())
        if len(got) == 4:
            s3.kill()
            threading.Timer(0.5, s3.start).start()
    deadline = time.monotonic() + 60
    while s3.process is None or s3.process.poll() is not None:  # nothing of the rest had to be asked for
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert got == expected_of(pages)
    assert loader.report()["complete"]


def on(endpoints: int, url: str, server: str) -> ObjectStorage | EndpointStorage:
    """A place, by one endpoint or as many as told."""
    return at(url, server) if endpoints == 1 else EndpointStorage([at(url, server)] * endpoints, budgets=PATIENT)


@pytest.mark.usefixtures("no_tokens_kept")
@pytest.mark.parametrize("endpoints", [1, 3])
def test_a_shard_that_is_written_again_is_never_mixed_with_its_predecessor(
    remote: str, s3: S3Server, endpoints: int
) -> None:
    pages = [("web", first, "train") for first in range(0, 80, 20)]
    dataset = PagedDataset(on(endpoints, remote, s3.url))
    loader = loader_of(pages, dataset=dataset, num_rows_per_page=20)
    digest_of(loader)
    storage = open_storage(remote)
    data = bytearray(storage.get("web/0000.parquet"))
    data[20] ^= 1
    storage.put("web/0000.parquet", bytes(data))
    with pytest.raises(PageError, match=r"web/0000\.parquet was written again .*choose pages anew"):
        digest_of(loader)


@pytest.mark.parametrize("endpoints", [1, 3])
def test_a_shard_that_was_written_again_is_read_as_it_is_by_a_new_loader(
    bucket: str, s3: S3Server, endpoints: int
) -> None:
    storage = open_storage(bucket)
    before, after = (
        shard_bytes([f"{word} {row}" for row in range(40)], compression="none", use_dictionary=False)
        for word in ("quick", "lazy!")
    )
    assert len(before) == len(after), "so that the index is the same"
    storage.put("web/0.parquet", before)
    write_index([storage], make_index(storage)[0])
    dataset = PagedDataset(on(endpoints, bucket, s3.url))
    for word, data in (("quick", before), ("lazy!", after), ("quick", before)):
        storage.put("web/0.parquet", data)
        assert not write_index([storage], make_index(storage)[0])
        got = batches_of(loader_of(choose(dataset, 1, 40, offset=0)))
        assert got == packed([TOKENIZER.encode([f"{word} {row}"]).ids.tolist() for row in range(40)], 3, 32)


# -- ends --------------------------------------------------------------------------------------------------------------

LEAVES = """
import sys
import penstock
from penstock.feed import Tokenizer
pages = [("books", 0, "train"), ("web", 450, "train"), ("web", 460, "train"), ("code", 0, "train")]
tokenizer = sys.argv[2]
loader = penstock.R2DatasetLoader.create(1, 4, pages, tokenizer, num_rows_per_page=5, dataset=sys.argv[1])
batches = iter(loader)
next(batches)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_ends_though_a_server_does_not_answer(
    remote: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.definition)
    with faulty_proxy(s3.url, stall=1.0, stall_s=300.0, only=r"web/0005\.parquet") as proxy:
        use_key(monkeypatch, "reader", proxy.url)
        with held_open(python(LEAVES, remote, str(tmp_path / "tokenizer.json"))) as process:
            deadline = time.monotonic() + 60
            while not proxy.made["stall"]:  # until something is under way
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert process.returncode == 0

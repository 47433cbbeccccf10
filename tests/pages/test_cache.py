"""Tokens of a page are kept by tokenizer and page, whatever the shape of batches; never another's, never stale."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from pages.making import (
    SIZES,
    TOKENIZER,
    batches_of,
    choose,
    digest_of,
    documents,
    loader_of,
    make_dataset,
    packed,
    shard_bytes,
    texts_of,
)
from penstock import R2DatasetLoader
from penstock.errors import PageError
from penstock.feed import train_tokenizer
from penstock.pages import PagedDataset
from penstock.pages.reading import PageReader
from penstock.storage import LocalStorage


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every page whose texts were read."""
    seen: list[Any] = []
    texts = PageReader.texts
    monkeypatch.setattr(
        PageReader, "texts", lambda self, source, more: (seen.append(source.page), texts(self, source, more))[1]
    )
    return seen


def test_a_page_is_read_once_for_all_shapes_and_loaders(dataset: Path, reads: list[Any]) -> None:
    pages = choose(dataset)
    first = batches_of(loader_of(pages))
    assert sorted(reads) == sorted(pages)
    assert batches_of(loader_of(pages)) == first
    for length in (5, 77):
        assert batches_of(loader_of(pages, length=length)) == packed(documents(pages, 37), 3, length)
    digest_of(loader_of(pages, packing=False))
    assert len(reads) == len(pages)


def test_another_tokenizer_or_page_size_has_tokens_of_its_own(dataset: Path, reads: list[Any]) -> None:
    pages = choose(dataset, 4)
    first = digest_of(loader_of(pages))
    other = train_tokenizer(["another text altogether"], vocab_size=270)
    assert digest_of(loader_of(pages, tokenizer=other)) != first
    smaller = choose(dataset, 4, 36)
    assert batches_of(loader_of(smaller)) == packed(documents(smaller, 36), 3, 32)
    assert len(reads) == 12


def test_a_page_that_begins_anywhere_is_not_kept(dataset: Path, reads: list[Any]) -> None:
    for _ in range(2):
        digest_of(loader_of([("web", 5, "train")], dataset=dataset))
    assert len(reads) == 2


def test_without_a_budget_nothing_is_kept(
    dataset: Path, reads: list[Any], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(R2DatasetLoader, "TOKEN_CACHE_BYTES", 0)
    for _ in range(2):
        digest_of(loader_of(choose(dataset, 3)))
    assert len(reads) == 6
    assert not (own_cache / "tokens").exists()


def test_tokens_of_a_shard_that_was_written_again_are_made_anew(tmp_path: Path, reads: list[Any]) -> None:
    folder = make_dataset(tmp_path / "set", {"web": 90})
    pages = [("web", 0, "train"), ("web", 45, "train")]

    def read() -> list[Any]:
        dataset = PagedDataset(LocalStorage(folder))  # as another process would see it
        return batches_of(loader_of(pages, dataset=dataset, num_rows_per_page=45))

    before = read()
    assert read() == before
    assert len(reads) == 2
    shard = folder / "web" / "0000.parquet"
    changed = [text.upper() for text in texts_of("web", 90)]
    data = shard_bytes(changed, group_rows=13)
    data_before = shard.read_bytes()
    if len(data) != len(data_before):  # the index tells sizes, so that this would be refused
        sizes = (
            (folder / "_shard_sizes.json")
            .read_text()
            .replace(f'"size_bytes": {len(data_before)}', f'"size_bytes": {len(data)}')
        )
        (folder / "_shard_sizes.json").write_text(sizes)
    shard.write_bytes(data)
    after = read()
    assert after == packed([TOKENIZER.encode([text]).ids.tolist() for text in changed], 3, 32)
    assert len(reads) == 4


def test_a_cache_folder_that_cannot_be_written_costs_only_time(
    dataset: Path, reads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = digest_of(loader_of(choose(dataset, 3)))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert digest_of(loader_of(choose(PagedDataset(LocalStorage(dataset)), 3))) == expected
    assert len(reads) == 9
    assert "no token cache" in caplog.text


def test_damaged_cache_files_are_made_anew(dataset: Path, reads: list[Any], own_cache: Path) -> None:
    pages = choose(dataset, 3)
    expected = digest_of(loader_of(pages))
    for path in own_cache.rglob("segments/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = os.urandom(len(data) - len(data) // 2)
        path.write_bytes(data)
    for path in (own_cache / "pages").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-3])
    again = choose(PagedDataset(LocalStorage(dataset)), 3)
    assert digest_of(loader_of(again)) == expected
    assert len(reads) > 3


def test_pages_of_all_splits_and_configs_are_kept_apart(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", SIZES)
    everything = choose(folder, 23)
    expected = packed(documents(everything, 37), 3, 32)
    for _ in range(2):
        assert batches_of(loader_of(everything)) == expected


def test_loaders_leave_no_open_files_behind(dataset: Path) -> None:
    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    def load(number: int) -> None:
        batches_of(loader_of(pages, dataset=LocalStorage(dataset), num_rows_per_page=37))
        batches_of(loader_of(R2DatasetLoader.next_pages(0, 1, 1, 10 + number, dataset=str(dataset))))

    pages = list(choose(dataset, 0, 3))
    for number in range(10):
        load(number)
    before = count()
    for number in range(10, 30):
        load(number)
    assert count() <= before + 3


def test_tokens_stay_within_their_bytes_also_over_many_processes(dataset: Path, tmp_path: Path) -> None:
    class Small(R2DatasetLoader):
        TOKEN_CACHE_BYTES = 6_000

    folder = Path(os.environ["PENSTOCK_CACHE"]) / "tokens"
    for window in range(8):  # a store of its own each time, as in processes that end
        pages = Small.next_pages(window * 3, 3, 1, 37, dataset=LocalStorage(dataset))
        batches_of(Small.create(3, 32, pages, TOKENIZER))
        kept = [path.stat().st_size for path in folder.rglob("segments/*")]
        assert kept
        assert sum(kept) <= 6_000


def test_an_id_that_does_not_fit_is_refused(dataset: Path) -> None:
    class Odd:
        eos_token_id = 1
        vocab_size = 1_000

        def encode(self, text: str) -> list[int]:
            return [70_000] * 3

    with pytest.raises(PageError, match="id 70000 and says that its vocab_size is 1000"):
        batches_of(loader_of(choose(dataset), tokenizer=Odd()))

"""Of a row group far larger than a page only a page's part is read, once it is known where that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equipment.servers import S3Server
from pages.making import TOKENIZER, digest_of, loader_of, put_shards, shard_bytes
from penstock import R2DatasetLoader
from penstock.errors import PageError
from penstock.pages import PagedDataset, make_index, write_index
from penstock.pages.data_pages import PagePlaces
from penstock.storage import LocalStorage, open_storage

COUNT = 4000
TEXTS = [f"row {row} " + "abcdefgh" * (row % 5) for row in range(COUNT)]
OPTIONS: dict[str, Any] = {
    "group_rows": COUNT,
    "data_page_size": 2_000,
    "write_batch_size": 20,
    "compression": "none",
    "dictionary_pagesize_limit": 3_000,
}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large for these tests."""
    monkeypatch.setattr(R2DatasetLoader, "READ_BUFFER_SIZE", 8_000)
    monkeypatch.setattr(R2DatasetLoader, "TOKEN_CACHE_BYTES", 0)
    monkeypatch.setattr("penstock.pages.footers._LARGE_BYTES", 100)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each request was for."""
    seen: list[int] = []
    read = PagedDataset.read

    def counted(self: PagedDataset, info: Any, start: int, stop: int) -> bytes:
        seen.append(stop - start)
        return read(self, info, start, stop)

    monkeypatch.setattr(PagedDataset, "read", counted)
    return seen


def tokens(dataset: Any, first: int, rows: int = 30) -> list[int]:
    loader = loader_of([("web", first, "train")], dataset=dataset, num_rows_per_page=rows)
    return [int(token) for batch in loader.batches() for token in batch.input_ids[batch.mask]]


def expected(first: int, rows: int = 30) -> list[int]:
    return TOKENIZER.encode(TEXTS[first : first + rows]).ids.tolist()


def make(folder: Path, **more: Any) -> PagedDataset:
    put_shards(folder, {"web/0.parquet": shard_bytes(TEXTS, **{**OPTIONS, **more})})
    return PagedDataset(LocalStorage(folder))


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_with_an_offset_index_a_page_costs_its_own_bytes(
    tmp_path: Path, reads: list[int], dictionary: bool, version: str
) -> None:
    dataset = make(tmp_path / "set", write_page_index=True, use_dictionary=dictionary, data_page_version=version)
    size = dataset.storage.head("web/0.parquet").size_bytes
    reads.clear()
    assert tokens(dataset, 3900) == expected(3900)
    assert sum(reads[1:]) < size / 8, "behind the footer: the index and a few data pages"
    for first in (0, 1, 17, 1999, COUNT - 1):
        assert tokens(dataset, first) == expected(first)


@pytest.mark.parametrize("dictionary", [True, False])
def test_without_one_the_way_there_is_walked_once(tmp_path: Path, reads: list[int], dictionary: bool) -> None:
    dataset = make(tmp_path / "set", use_dictionary=dictionary)
    assert tokens(dataset, 3900) == expected(3900)
    reads.clear()
    for first in (3000, 17, 0, 3899):
        assert tokens(dataset, first) == expected(first)
    assert sum(reads) < 60_000, "four pages"
    assert tokens(dataset, COUNT - 1) == expected(COUNT - 1)


def test_any_rows_of_a_walked_chunk_are_the_right_ones(tmp_path: Path) -> None:
    for number, options in enumerate(({}, {"write_page_index": True}, {"use_dictionary": False})):
        dataset = make(tmp_path / str(number), **options)
        for first, rows in ((2500, 1), (10, 700), (2499, 3), (0, COUNT), (3999, 5), (1234, 77)):
            assert tokens(dataset, first, rows) == expected(first, rows)


def test_what_was_walked_is_remembered_by_other_processes(bucket: str, s3: S3Server, reads: list[int]) -> None:
    storage = open_storage(bucket)
    storage.put("web/0.parquet", shard_bytes(TEXTS, **OPTIONS))
    write_index([storage], make_index(storage)[0])
    assert tokens(PagedDataset(open_storage(bucket)), 3900) == expected(3900)
    reads.clear()
    assert tokens(PagedDataset(open_storage(bucket)), 3000) == expected(3000)
    assert sum(reads) < 20_000


@pytest.mark.parametrize("indexed", [True, False])
def test_texts_larger_than_a_buffer_are_asked_for_in_several_ranges(
    tmp_path: Path, reads: list[int], indexed: bool
) -> None:
    texts = [f"{row} " + "abcdefgh" * 3_000 for row in range(8)]
    data = shard_bytes(texts, **{**OPTIONS, "write_page_index": indexed, "use_dictionary": False})
    put_shards(tmp_path / "set", {"web/0.parquet": data})
    reads.clear()
    got = tokens(PagedDataset(LocalStorage(tmp_path / "set")), 2, 4)
    assert got == TOKENIZER.encode(texts[2:6]).ids.tolist()
    assert max(reads[1:]) <= R2DatasetLoader.READ_BUFFER_SIZE, "behind the footer"


def test_pages_of_one_group_come_in_parallel_and_right(tmp_path: Path) -> None:
    dataset = make(tmp_path / "set")
    pages = [("web", first, "train") for first in range(0, COUNT, 100)]
    one = digest_of(loader_of(pages, dataset=dataset, num_rows_per_page=100))
    again = digest_of(loader_of(pages[::-1], dataset=make(tmp_path / "other"), num_rows_per_page=100, batch_size=1))
    whole = digest_of(loader_of([("web", 0, "train")], dataset=dataset, num_rows_per_page=COUNT))
    assert one == whole != again


def test_a_walk_is_saved_and_loaded() -> None:
    raw = shard_bytes(TEXTS, **OPTIONS)
    import pyarrow as pa
    from pyarrow import parquet

    column = parquet.read_metadata(pa.BufferReader(raw)).row_group(0).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    own = memoryview(raw)[start : start + column.total_compressed_size]
    places = PagePlaces()
    places.walk(lambda at, size: own[at : at + size], len(own), 2000, "it")
    loaded = PagePlaces(places.as_array())
    assert loaded.find(30, 60, "it") == places.find(30, 60, "it")
    for walker in (places, loaded):
        walker.walk(lambda at, size: own[at : at + size], len(own), COUNT, "it")
    assert loaded.find(3000, 3100, "it") == places.find(3000, 3100, "it")


def test_an_offset_index_that_is_none_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    make(folder, write_page_index=True)
    dataset = PagedDataset(LocalStorage(folder))
    (shard,) = dataset.catalog().part("web", "train").shards
    at, size = dataset.facts(shard, None, dataset.info(shard)).groups[0, 5:7].tolist()
    assert size > 0
    path = folder / "web" / "0.parquet"
    data = bytearray(path.read_bytes())
    data[at : at + size] = b"\xff" * size
    path.write_bytes(data)
    with pytest.raises(PageError, match=r"web/0\.parquet, column 'text', row group 0 has an offset index"):
        tokens(PagedDataset(LocalStorage(folder)), 0)

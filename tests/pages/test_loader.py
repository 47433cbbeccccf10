"""Pages come out as batches of one shape, every token of every row once, whatever way they are asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pages.making import (
    END,
    SIZES,
    TOKENIZER,
    batches_of,
    choose,
    digest_of,
    documents,
    loader_of,
    make_dataset,
    packed,
    padded,
    texts_of,
)
from penstock import R2DatasetLoader
from penstock.errors import ConfigError, PageError, PenstockError, SourceError
from penstock.pages import PagedDataset
from penstock.pages.budget import ByteBudget
from penstock.pages.choice import Page
from penstock.pages.pipeline import PagePipeline
from penstock.pages.tokens import PageTokens
from penstock.storage import LocalStorage, open_storage


def threads() -> list[str]:
    mine = ("penstock pages", "penstock request")  # others may be left of other tests
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(mine)]


def wait_until_no_threads() -> None:
    deadline = time.monotonic() + 30
    while threads():
        assert time.monotonic() < deadline, threads()
        time.sleep(0.01)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_packed_batches_hold_every_token_of_every_row_once_and_in_order(dataset: Path) -> None:
    pages = choose(dataset)
    got = batches_of(loader_of(pages))
    assert got == packed(documents(pages, 37), 3, 32)


def test_padded_batches_begin_a_row_with_each_document_and_split_long_ones(dataset: Path) -> None:
    pages = choose(dataset)
    got = batches_of(loader_of(pages, packing=False))
    assert got == padded(documents(pages, 37), 3, 32)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_size=st.integers(1, 9),
    length=st.integers(1, 70),
    rows=st.integers(1, 130),
    n_pages=st.integers(0, 7),
    packing=st.booleans(),
    offset=st.integers(0, 10_000),
)
def test_any_shape_holds_the_same_tokens(
    dataset: Path, batch_size: int, length: int, rows: int, n_pages: int, packing: bool, offset: int
) -> None:
    pages = choose(dataset, n_pages, rows, offset=offset)
    loader = loader_of(pages, batch_size=batch_size, length=length, packing=packing)
    lay = packed if packing else padded
    expected = lay(documents(pages, rows), batch_size, length)
    got, text = [], []
    for batch in loader.batches():
        got.append(batch.input_ids.tolist())
        text += batch.input_ids[batch.mask].tolist()
    assert got == expected
    assert text == [token for row in documents(pages, rows) for token in row], "the mask is text, all of it"
    assert len(loader) == len(expected)
    assert [loader[k].tolist() for k in range(len(expected))] == expected


def test_filling_is_marked_and_told_from_an_end_of_text_that_is_text(dataset: Path) -> None:
    loader = loader_of(choose(dataset, 1, 10), batch_size=4, length=16, packing=False)
    seen = 0
    for batch in loader:
        mask = loader.mask
        assert batch.shape == mask.shape == (4, 16)
        assert (mask.sum(axis=1) == loader.lengths).all()
        assert (batch[~mask] == END).all()
        seen += int((batch[mask] == END).sum())
    assert seen == 10, "each document's own end is text"


def test_filling_may_be_any_id(dataset: Path) -> None:
    pages = choose(dataset, 2, 10)
    for packing in (True, False):
        loader = loader_of(pages, packing=packing, pad_id=-100)
        for batch in loader:
            assert ((batch != -100) == loader.mask).all()


def test_a_document_as_long_as_a_row_keeps_its_end_of_text(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "one", {"web": 30})
    length = len(documents([("web", 3, "train")], 1, {"web": 30})[0]) - 1
    loader = loader_of(
        [("web", 3, "train")], batch_size=2, length=length, packing=False, num_rows_per_page=1, dataset=dataset
    )
    (batch,) = list(loader)
    assert batch[1, 0] == END
    assert loader.lengths.tolist() == [length, 1]


def test_batches_are_the_callers_to_keep(dataset: Path) -> None:
    kept = list(loader_of(choose(dataset)))
    for batch in kept:
        before = batch.copy()
        batch[:] = 0
        assert not np.array_equal(before, batch)
    assert batches_of(kept[1:]) == [np.zeros((3, 32), dtype=int).tolist()] * (len(kept) - 1)


def test_no_pages_are_no_batches(dataset: Path) -> None:
    loader = loader_of(choose(dataset, 0))
    assert list(loader) == []
    assert len(loader) == 0


# -- which pages -------------------------------------------------------------------------------------------------------


def test_a_round_through_all_pages_reads_every_row_once(dataset: Path) -> None:
    count = sum(-(-rows // 100) for rows in SIZES.values())
    pages = choose(dataset, count, 100, offset=123_456)
    read = Counter((page.config_name, page.first_row + n) for page in pages for n in range(page.row_count))
    assert read == {(config, row): 1 for config, rows in SIZES.items() for row in range(rows)}
    text = sorted(np.concatenate([b.input_ids[b.mask] for b in loader_of(pages).batches()]).tolist())
    everything = [text for config, rows in SIZES.items() for text in texts_of(config, rows)]
    assert text == sorted(TOKENIZER.encode(everything).ids.tolist())


def test_pages_are_tuples_in_a_list_and_survive_json(dataset: Path) -> None:
    pages = choose(dataset)
    assert isinstance(pages, list)
    assert all(isinstance(page, tuple) and len(page) == 3 for page in pages)
    sent = orjson.loads(orjson.dumps([tuple(page) for page in pages]))
    loader = loader_of(sent, dataset=dataset, num_rows_per_page=37)
    assert digest_of(loader) == digest_of(loader_of(pages))
    assert loader.report()["digest"] == (same := loader_of(pages), digest_of(same))[0].report()["digest"]


def test_some_of_a_windows_pages_still_know_their_rows(dataset: Path) -> None:
    pages = choose(dataset)
    for some in (pages[2:5], list(pages)[2:5], pages.copy()[2:5]):
        assert batches_of(loader_of(some, dataset=dataset)) == packed(documents(pages[2:5], 37), 3, 32)


def test_a_page_may_begin_anywhere(dataset: Path) -> None:
    pages = [("web", 33, "train"), ("code", 1, "train"), ("web", 529, "train")]
    assert batches_of(loader_of(pages, dataset=dataset)) == packed(documents(pages, 100), 3, 32)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (("web", 530, "train"), "begins at row 530 of 'web', split 'train', which has 530"),
        (("web", -1, "train"), "begins at row -1"),
        (("nowhere", 0, "train"), "no config 'nowhere'.*books/train, code/train, web/train"),
        (("web", 0, "valid"), "no config 'web' with a split 'valid'"),
        (("web", 0), r"pages_info\[0\] is \('web', 0\): expected \(config_name, first_row, split\)"),
        (7, "expected"),
    ],
)
def test_what_is_no_page_is_refused(dataset: Path, page: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        list(loader_of([page], dataset=dataset))


def test_page_sizes_that_contradict_each_other_are_refused(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="has 37 rows, and num_rows_per_page=5 makes it 5"):
        list(loader_of(choose(dataset), num_rows_per_page=5))


def test_seeds_that_look_alike_are_alike_and_others_are_not(dataset: Path) -> None:
    assert choose(dataset, seed="7") == R2DatasetLoader.next_pages(4, 9, np.int64(7), 37, dataset=dataset)  # pyright: ignore
    assert choose(dataset, seed="7") != choose(dataset, seed="8")
    for seed in (None, 1.5, True, "\ud800"):
        with pytest.raises(ConfigError, match=r"is no (seed|text)"):
            R2DatasetLoader.next_pages(0, 1, seed, dataset=dataset)  # pyright: ignore[reportArgumentType]


def test_more_pages_than_there_are_is_refused(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="n_pages=30 is more than the 23 pages of 37 rows"):
        choose(dataset, 30)


def test_a_page_longer_than_its_config_has_all_its_rows(dataset: Path) -> None:
    pages = choose(dataset, 3, 10_000)
    assert sorted(page.row_count for page in pages) == sorted(SIZES.values())
    assert batches_of(loader_of(pages)) == packed(documents(pages, 10_000), 3, 32)


def test_splits_have_pages_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "splits"
    storage = open_storage(folder)
    make_dataset(folder / "train", {"web": 50})
    make_dataset(folder / "validation", {"web": 20})
    make_dataset(folder / "test", {"web": 10})
    for part in ("train", "validation", "test"):
        for name in ("_shard_sizes.json", "_metadata.yaml"):
            (folder / part / name).unlink()
    from penstock.pages import make_index, write_index

    write_index([storage], make_index(storage)[0])
    counts = {
        split: sum(page.row_count for page in choose(folder, n, 10, split=split))
        for split, n in (("train", 5), ("valid", 2), ("validation", 2), ("test", 1))
    }
    assert counts == {"train": 50, "valid": 20, "validation": 20, "test": 10}
    with pytest.raises(ConfigError, match="no split 'extra': it has test, train, valid"):
        choose(folder, 1, split="extra")


# -- ways of asking ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_these() -> None:
    names = ("MAX_CONCURRENT_REQUESTS", "PREFETCH_SIZE", "READ_BUFFER_SIZE", "BATCH_SIZE", "CF_REGION_NAME")
    assert [getattr(R2DatasetLoader, name) for name in names] == [8, 3, 4 * 1024 * 1024, 128, "enam"]
    assert R2DatasetLoader.DATASET_SUBFOLDER == "HuggingFaceFW_fineweb-edu-score-2"


def test_code_that_awaits_works_as_well(dataset: Path) -> None:
    async def awaited() -> tuple[list[Any], list[Any], list[Any]]:
        pages = await R2DatasetLoader.next_pages(4, 9, "me", 37, dataset=dataset)
        twin = await R2DatasetLoader.next_pages_async(4, 9, "me", 37, dataset=dataset)
        loader = await R2DatasetLoader.create(3, 32, pages, TOKENIZER, True)
        return pages, twin, [batch.tolist() async for batch in loader]

    pages, twin, got = asyncio.run(awaited())
    assert pages == twin == choose(dataset)
    assert got == batches_of(loader_of(pages))


def test_next_goes_through_the_batches_one_by_one(dataset: Path) -> None:
    pages = choose(dataset)
    with loader_of(pages) as loader:
        first = [next(loader).tolist(), next(loader).tolist()]
        rest = []
        while (batch := next(loader, None)) is not None:
            rest.append(batch.tolist())
        assert first + rest == batches_of(loader_of(pages))
        assert next(loader).tolist() == first[0], "then it begins again"
    wait_until_no_threads()


def test_each_iteration_begins_at_the_beginning(dataset: Path) -> None:
    loader = loader_of(choose(dataset))
    assert batches_of(loader) == batches_of(loader) == [loader[k].tolist() for k in range(len(loader))]
    with pytest.raises(IndexError):
        loader[len(loader)]
    assert loader[-1].tolist() == batches_of(loader)[-1]


@pytest.mark.parametrize("budget", [1, 256 << 20])
def test_leaving_early_ends_the_threads(dataset: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(R2DatasetLoader, "PREFETCH_BYTES", budget)
    loader = loader_of(choose(dataset, 20, 30))
    for place, _ in enumerate(loader):
        if place == 2:
            assert threads()
            break
    wait_until_no_threads()
    iteration = iter(loader)
    next(iteration)
    iteration.close()
    wait_until_no_threads()


def test_threads_that_share_a_loader_get_the_same_batches(dataset: Path) -> None:
    loader = loader_of(choose(dataset))
    expected = digest_of(loader_of(choose(dataset)))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(digest_of, [loader] * 4)) == {expected}


@pytest.mark.parametrize("requests", [1, 7])
@pytest.mark.parametrize("ahead", [0, 5])
@pytest.mark.parametrize("buffer", [1, 700, 4 << 20])
def test_how_much_is_asked_for_at_a_time_changes_nothing(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, requests: int, ahead: int, buffer: int
) -> None:
    expected = batches_of(loader_of(choose(dataset)))
    for name, value in (("MAX_CONCURRENT_REQUESTS", requests), ("PREFETCH_SIZE", ahead), ("READ_BUFFER_SIZE", buffer)):
        monkeypatch.setattr(R2DatasetLoader, name, value)
    monkeypatch.setattr(R2DatasetLoader, "TOKEN_CACHE_BYTES", 0)
    monkeypatch.setattr(R2DatasetLoader, "BATCH_SIZE", 3)
    assert batches_of(loader_of(choose(dataset))) == expected


@pytest.mark.parametrize("name", ["batch_size", "sequence_length"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_a_shape_that_holds_nothing_is_refused(dataset: Path, name: str, value: Any) -> None:
    given: dict[str, Any] = {"batch_size": 3, "sequence_length": 32, name: value}
    with pytest.raises(ConfigError, match=name):
        R2DatasetLoader.create(pages_info=choose(dataset), tokenizer=TOKENIZER, **given)


@pytest.mark.parametrize(
    "given", [{"num_rows_per_page": "10"}, {"num_rows_per_page": 10.5}, {"pad_id": "x"}, {"pad_id": 1 << 63}]
)
def test_what_is_no_number_is_refused_before_anything_is_read(dataset: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        loader_of([("web", 0, "train")], dataset=dataset, **given)


def test_a_split_that_is_no_name_is_refused(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="split=3 is no name"):
        choose(dataset, split=3)


def test_a_forked_process_that_goes_on_with_an_iteration_is_told(dataset: Path) -> None:
    loader = loader_of(choose(dataset), batch_size=1, length=8)
    batches = iter(loader)
    next(batches)
    pipeline = PagePipeline(loader._open().pages, lambda *_: None, ahead=0, max_requests=1, budget_bytes=1)  # pyright: ignore
    pipeline._requests._lock.acquire()  # as a thread may have it while another forks
    pipeline._changed.acquire()
    child = os.fork()
    if not child:
        signal.alarm(60)
        told = "nothing"
        try:
            pipeline.close()
            list(batches)
        except PenstockError as error:
            told = str(error)
        finally:
            os._exit(0 if "goes on in a fork" in told else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert list(batches), "it goes on in its own process"


# -- tokenizers --------------------------------------------------------------------------------------------------------


class Called:
    """A tokenizer of the transformers kind, without the parts that could be looked into."""

    eos_token_id = END

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": [TOKENIZER.encode([text]).ids[:-1].tolist() for text in texts]}


class Encoder:
    """One that knows `encode` and nothing else."""

    eos_token_id = END
    vocab_size = 300

    def encode(self, text: str) -> list[int]:
        return TOKENIZER.encode([text]).ids[:-1].tolist()


class Fast:
    """One of the transformers kind over the tokenizers library."""

    eos_token = TOKENIZER.end_of_text
    eos_token_id = END
    backend_tokenizer = tokenizers.Tokenizer.from_str(TOKENIZER.definition)


class Both:
    """One that may be called, in a way of its own, and has `encode`; its end of text is numpy's."""

    eos_token_id = np.int64(END)

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = TOKENIZER.encode([text]).ids[:-1].tolist()
        return [0, *ids] if add_special_tokens else ids


def test_a_tokenizer_may_be_named_or_handed_in_as_any_object(dataset: Path, tmp_path: Path) -> None:
    pages = choose(dataset)
    expected = digest_of(loader_of(pages))
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZER.definition)
    given = [
        file,
        str(file),
        str(tmp_path),
        tokenizers.Tokenizer.from_file(str(file)),
        Fast(),
        Called(),
        Encoder(),
        Both(),
    ]
    assert [digest_of(loader_of(pages, tokenizer=one)) for one in given] == [expected] * len(given)


def test_a_damaged_shard_spoils_only_its_own_pages(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    for shard in (folder / "books").iterdir():
        shard.write_bytes(bytes(shard.stat().st_size))
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.definition)
    pages = [("web", 0, "train")]
    loader = loader_of(pages, tokenizer=tmp_path / "tokenizer.json", dataset=folder)
    assert batches_of(loader) == packed(documents(pages, 100), 3, 32)
    with pytest.raises(PageError, match="'books'"):
        list(loader_of([("books", 0, "train")], tokenizer=tmp_path / "tokenizer.json", dataset=folder))


def test_where_no_text_can_be_read_it_is_told_what_for(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", {"web": 20})
    (folder / "web" / "0000.parquet").write_bytes(bytes((folder / "web" / "0000.parquet").stat().st_size))
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.definition)
    with pytest.raises(SourceError, match=r"to compare tokenizer engines by: .*0000\.parquet"):
        list(loader_of([("web", 0, "train")], tokenizer=tmp_path / "tokenizer.json", dataset=folder))


@pytest.mark.parametrize("ids", [[-1], np.array([-1]), [1 << 40], ["a"], [[1]], [0.5]])
def test_ids_that_are_none_are_refused(dataset: Path, ids: Any) -> None:
    class Odd:
        eos_token_id = END

        def encode(self, text: str) -> Any:
            return ids

    with pytest.raises(PageError, match=r"the tokenizer \(Odd\).*expected"):
        list(loader_of(choose(dataset), tokenizer=Odd()))


def test_what_is_no_tokenizer_is_refused(dataset: Path) -> None:
    for one, problem in ((None, "encodes nothing"), (7, "encodes nothing"), (len, "no eos_token_id")):
        with pytest.raises(ConfigError, match=problem):
            list(loader_of(choose(dataset), tokenizer=one))


# -- requests, memory and order of loading -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_than_allowed_are_under_way(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    under_way, most, lock = 0, 0, threading.Lock()

    def counted(method: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal under_way, most
            with lock:
                under_way += 1
                most = max(most, under_way)
            try:
                time.sleep(0.001)
                return method(*args)
            finally:
                with lock:
                    under_way -= 1

        return call

    pages = choose(dataset, 6, 150)  # each in several shards, and in several ranges of each
    expected = digest_of(loader_of(pages))
    for name in ("MAX_CONCURRENT_REQUESTS", "TOKEN_CACHE_BYTES", "READ_BUFFER_SIZE"):
        monkeypatch.setattr(
            R2DatasetLoader, name, {"MAX_CONCURRENT_REQUESTS": limit, "READ_BUFFER_SIZE": 500}.get(name, 0)
        )
    monkeypatch.setattr(LocalStorage, "get_range", counted(LocalStorage.get_range))
    assert digest_of(loader_of(list(pages), dataset=PagedDataset(LocalStorage(dataset)))) == expected
    assert most <= limit
    assert most > 1 or limit == 1


def page_tokens(number: int) -> PageTokens:
    return PageTokens(Page.of("c", number, "train", 1), np.full(10, number, dtype="<u2"), np.array([0, 10]))


def test_memory_holds_the_budget_whatever_is_loaded_ahead() -> None:
    sizes = [100, 30, 80, 250, 10, 60, 100, 90] * 5
    held, most, lock = 0, 0, threading.Lock()

    def load(page: Page, _: Any, claim: Any) -> PageTokens:
        nonlocal held, most
        claim(sizes[page.first_row])
        with lock:
            held += sizes[page.first_row]
            most = max(most, held)
        time.sleep(0.001)
        with lock:
            held -= sizes[page.first_row]
        return page_tokens(page.first_row)

    pages = [Page.of("c", number, "train", 1) for number in range(len(sizes))]
    pipeline = PagePipeline(pages, load, ahead=6, max_requests=4, budget_bytes=200)
    assert [int(tokens.ids[0]) for tokens in pipeline] == list(range(len(sizes)))
    assert most <= 250, "the budget, or one page that is larger alone"
    assert pipeline.budget.largest <= 250


def test_a_page_that_fails_is_told_in_its_place_behind_those_before_it() -> None:
    def load(page: Page, _: Any, claim: Any) -> PageTokens:
        if page.first_row == 3:
            raise ConfigError("no such luck")
        claim(10)
        return page_tokens(page.first_row)

    pages = [Page.of("c", number, "train", 1) for number in range(8)]
    loaded = iter(PagePipeline(pages, load, ahead=5, max_requests=2, budget_bytes=15))
    assert [next(loaded).page.first_row for _ in range(3)] == [0, 1, 2]
    with pytest.raises(PageError, match=r"page \('c', 3, 'train'\) of 1 rows cannot be read: no such luck"):
        next(loaded)
    wait_until_no_threads()


def test_the_next_pages_are_loaded_while_one_is_used() -> None:
    begun: list[int] = []

    def load(page: Page, _: Any, claim: Any) -> PageTokens:
        claim(1)
        begun.append(page.first_row)
        return page_tokens(page.first_row)

    pages = [Page.of("c", number, "train", 1) for number in range(9)]
    pipeline = iter(PagePipeline(pages, load, ahead=3, max_requests=2, budget_bytes=1000))
    next(pipeline)
    deadline = time.monotonic() + 30
    while len(begun) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(begun) == [0, 1, 2, 3], "three behind the one that is used, and no more"
    pipeline.close()


def test_a_budget_goes_to_pages_in_their_order() -> None:
    budget = ByteBudget(100)
    order: list[int] = []

    def take(number: int) -> None:
        budget.take(number, 60)
        order.append(number)
        budget.give(number)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(take, [4, 2, 3, 0, 1]))
    assert order == [0, 1, 2, 3, 4]

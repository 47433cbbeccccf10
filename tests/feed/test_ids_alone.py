"""Batches of ids alone, which are handed out some at a time: the same as all others, and a state behind every one."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feed.stores import TOKENIZER
from penstock.blocks import BlockManager, ingest
from penstock.feed import DistributedLoader, Mix, sequences, source_feed, token_cache, token_segments, token_store
from penstock.feed.unmapping import wait_until_given_back
from penstock.plans.orders import ORDERS, OrderName

ROW = 512
ROWS, DOCUMENTS = 203, 61
IDS = np.random.default_rng(5).integers(0, 250, ROWS * ROW).astype("<u2")
KINDS = ("rows", "documents")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long samples, all of one length or not: what is gathered from the cache batch by batch."""
    folder = tmp_path_factory.mktemp("ids")
    IDS.tofile(folder / "rows.bin")
    ingest(folder / "rows.bin", folder / "rows", tokens_per_sample=ROW, token_dtype="uint16")
    cuts = np.sort(np.random.default_rng(6).choice(np.arange(1, len(IDS)), DOCUMENTS - 1, replace=False))
    documents = [{"input_ids": part.tolist()} for part in np.split(IDS, cuts)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    ingest(folder / "documents.jsonl", folder / "documents")
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 12_000)
    monkeypatch.setattr(source_feed, "WINDOW_CHUNKS", 5)
    monkeypatch.setattr(sequences, "_GATHERED_BYTES", 3 * 4 * ROW * 2)


def make_loader(dataset: Path | BlockManager | Mix, batch_size: int = 4, **more: Any) -> DistributedLoader:
    more = {"fields": ("input_ids",), "tokenizer": TOKENIZER, "sequence_length": ROW, **more}
    return DistributedLoader(dataset, batch_size, 3, **more)


def plain(batch: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return batch["input_ids"].tolist(), batch["sample_ids"].tolist()


@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_batches_of_a_loader_with_all_fields_and_so_are_the_states_behind_each(
    kept: Path, kind: str, order: OrderName, batch_size: int
) -> None:
    alone = make_loader(kept / kind, batch_size, order=order)
    full = make_loader(kept / kind, batch_size, order=order, fields=("input_ids", "labels"))
    for epoch in range(2):  # the first reads them in, the second has all at hand
        for ours, theirs in zip(alone, full, strict=True):
            assert plain(ours) == plain(theirs)
            assert alone.state_dict() == full.state_dict()
            assert (alone.epoch, alone.position) == (epoch, full.position)
        assert (alone.epoch, alone.step) == (epoch + 1, 0)
        assert alone.timings()["batches"] == full.timings()["batches"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_in_many_segments_gives_the_same_batches(
    kept: Path, kind: str, order: OrderName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [plain(batch) for batch in make_loader(kept / kind, order=order)]
    shutil.copytree(kept / kind, tmp_path / "store", ignore=shutil.ignore_patterns("tokens"))
    monkeypatch.setattr(token_segments, "_UNBOUNDED_SEGMENT_BYTES", 30_000)
    loader = make_loader(tmp_path / "store", order=order)
    for _ in range(2):  # the first reads them in, the second has all at hand
        assert [plain(batch) for batch in loader] == wanted
        loader.reshuffle(0)
    assert len(list((tmp_path / "store" / "tokens").glob("*/segments/*"))) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_state_behind_any_batch_the_rest_is_the_same(kept: Path, kind: str) -> None:
    loader = make_loader(kept / kind)
    list(loader)
    batches, states = [], []
    for batch in loader:
        batches.append(plain(batch))
        states.append(json.dumps(loader.state_dict()))
    assert len(batches) > 40
    for step in (1, 2, 3, 4, 17, len(batches) - 2, len(batches) - 1):
        resumed = make_loader(kept / kind)
        list(resumed)
        resumed.load_state_dict(json.loads(states[step - 1]))
        assert resumed.step == step
        assert [plain(batch) for batch in resumed] == batches[step:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_changed_between_two_batches_holds_and_the_place_is_not_lost(
    kept: Path, kind: str, at_once: bool
) -> None:
    loader, plainly = make_loader(kept / kind), make_loader(kept / kind, fields=("input_ids", "labels"))
    for each in (loader, plainly):
        list(each)
    for step, (ours, theirs) in enumerate(zip(loader, plainly, strict=True), start=1):
        assert plain(ours) == plain(theirs)
        assert loader.step == step
        if step in (5, 6, 11):
            for each in (loader, plainly):
                each.exclude([step, step + 20], at_once=at_once)
            assert loader.step == step
        assert loader.state_dict() == plainly.state_dict()
    assert len(loader.state_dict()["exclusions"]) == 3


def test_another_epoch_can_be_gone_to_between_two_batches(kept: Path) -> None:
    loader = make_loader(kept / "rows")
    list(loader)
    for _ in zip(range(5), loader, strict=False):
        pass
    loader.reshuffle(7)
    assert (loader.epoch, loader.step) == (7, 0)
    first = next(iter(loader))
    assert plain(first) == plain(loader.batch(7, 0))
    assert loader.step == 1


def test_a_batch_that_is_kept_is_not_overwritten(kept: Path) -> None:
    loader = make_loader(kept / "rows")
    list(loader)
    both = [(batch["input_ids"], batch["input_ids"].copy()) for batch in loader]
    assert all(np.array_equal(held, copied) for held, copied in both)


@pytest.mark.parametrize("fields", [("input_ids",), ("input_ids", "labels", "spans")])
@pytest.mark.parametrize("length", [ROW, ROW // 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_the_callers_to_change(kept: Path, kind: str, length: int, fields: Any) -> None:
    loader = make_loader(kept / kind, sequence_length=length, fields=fields)
    list(loader)
    state = loader.state_dict()
    given = list(islice(loader, 4))  # all of one window, which is kept
    before = [{name: array.tolist() for name, array in batch.items()} for batch in given]
    for batch in given:
        for array in batch.values():
            array[:] = 1
    loader.load_state_dict(state)
    assert [{name: array.tolist() for name, array in batch.items()} for batch in islice(loader, 4)] == before


# -- what counts as this process's memory ------------------------------------------------------------------------------


def resident_bytes(store: Path) -> int:
    """How much of a data set's token cache is mapped into this process now."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            inside = str(store) in line and "segments" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("order", ["shard-local", "sequential", "shuffled"])
@pytest.mark.parametrize("by", ["iterating", "number", "mixing"])
def test_what_was_used_is_let_go_of_but_for_some_of_what_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: OrderName, by: str
) -> None:
    rows = 12_000
    np.tile(IDS, rows // ROWS + 1)[: rows * ROW].tofile(tmp_path / "rows.bin")
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 256 << 10)
    ingest(tmp_path / "rows.bin", tmp_path / "store", tokens_per_sample=ROW, token_dtype="uint16")
    data_bytes = rows * ROW * 2

    monkeypatch.setattr(token_store, "MAPPED_BYTES", data_bytes * 2)
    with BlockManager(tmp_path / "store") as blocks:
        mix = Mix({"only": blocks}, weights={"only": 1}, steps_per_epoch=rows // 8)
        loader = make_loader(mix if by == "mixing" else blocks, 8, order=order)
        for _ in range(2):
            if by == "number":
                _ = [loader.batch(0, k) for k in range(loader.batches_per_epoch)] if loader.epoch else list(loader)
            else:
                list(loader)
        wait_until_given_back()
        mapped = resident_bytes(tmp_path / "store")
    if order == "shuffled":
        assert mapped >= data_bytes * 0.9
    else:
        assert mapped <= data_bytes / 4, "two windows, which may be in use, and what is mapped around them"

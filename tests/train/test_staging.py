"""Batches staged ahead are the feed's own, whatever was prepared and whoever ends early."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.blocks import BlockManager
from penstock.errors import BlockStoreError
from penstock.feed import ChunkFeed, PackedWindow, train_tokenizer
from penstock.train.staging import Excluded, Staging
from penstock.types import ChunkRef

CPU = torch.device("cpu")


class CountingFeed(ChunkFeed):
    """Remembers which chunks were made, and in which thread."""

    def __init__(self, store: Path) -> None:
        tokenizer = train_tokenizer(["some words to learn"], vocab_size=300)
        super().__init__(BlockManager(store, dataset_chunk_size=5), tokenizer, batch_size=2, sequence_length=16)
        self.made: list[tuple[ChunkRef, str]] = []

    def window(self, ref: ChunkRef, excluded: Excluded = ()) -> PackedWindow:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.made.append((ref, threading.current_thread().name))
        return super().window(ref, excluded)


@pytest.fixture
def feed(store: Path) -> CountingFeed:
    return CountingFeed(store)


def test_they_are_the_feeds_batches_from_any_offset(feed: CountingFeed) -> None:
    staging = Staging(feed, CPU)
    for offset in (0, 3):
        expected = list(feed.batches(ChunkRef(0, 1), offset))
        staged = list(staging.batches(ChunkRef(0, 1), offset))
        assert len(staged) == len(expected) > 1
        for (batch, wait_s), source in zip(staged, expected, strict=True):
            assert np.array_equal(batch.input_ids.numpy(), source.input_ids)
            assert np.array_equal(batch.labels.numpy(), source.labels)
            assert (batch.num_tokens, batch.source.stop_offset) == (source.num_tokens, source.stop_offset)
            assert wait_s >= 0
    staging.close()


def test_a_prepared_chunk_is_made_once_and_in_another_thread(feed: CountingFeed) -> None:
    staging = Staging(feed, CPU)
    staging.prepare_following(ChunkRef(0, 4))
    assert list(staging.batches(ChunkRef(1, 0), 0))
    assert [ref for ref, _ in feed.made] == [ChunkRef(1, 0)]
    assert feed.made[0][1] != threading.main_thread().name
    staging.close()


def test_a_wrong_guess_is_dropped_and_so_is_one_made_before_samples_were_excluded(feed: CountingFeed) -> None:
    staging = Staging(feed, CPU)
    staging.prepare(ChunkRef(0, 1))
    batches = [batch for batch, _ in staging.batches(ChunkRef(0, 2), 0)]
    assert batches[0].source.spans[0, 0] == 10
    staging.prepare(ChunkRef(0, 3))
    batches = [batch for batch, _ in staging.batches(ChunkRef(0, 3), 0, ((0, 2),))]
    assert batches[0].source.spans[0, 0] == 17
    staging.close()


def test_a_chunk_that_is_taken_up_again_is_not_made_again(feed: CountingFeed) -> None:
    staging = Staging(feed, CPU)
    first = staging.batches(ChunkRef(0, 1), 0)
    batch, _ = next(first)
    first.close()
    assert list(staging.batches(ChunkRef(0, 1), batch.source.stop_offset))
    assert len(feed.made) == 1


def test_behind_the_last_chunk_nothing_is_prepared(feed: CountingFeed) -> None:
    staging = Staging(feed, CPU)
    staging.prepare_following(ChunkRef(2, 1))
    staging.close()
    assert not feed.made


def test_a_chunk_that_cannot_be_made_is_an_error_where_it_is_asked_for(feed: CountingFeed) -> None:
    staging = Staging(feed, CPU)
    staging.prepare(ChunkRef(0, 99))
    assert list(staging.batches(ChunkRef(0, 0), 0))  # nobody has asked for the other one
    staging.prepare(ChunkRef(0, 99))
    with pytest.raises((BlockStoreError, ValueError)):
        list(staging.batches(ChunkRef(0, 99), 0))
    staging.close()

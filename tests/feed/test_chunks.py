"""The chunk feed over a real block store: each sample in its place, and the same arrays on every call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import tokenizers

from penstock.blocks import BlockManager, ingest
from penstock.errors import BlockStoreError, ConfigError
from penstock.feed import Batch, ChunkFeed, Tokenizer, train_tokenizer
from penstock.types import ChunkRef

TEXTS = [f"sample number {number}: " + "word " * (number % 5) for number in range(11)]
TEXTS[3] = ""
TEXTS[7] = "a long one, " * 30
CHUNKS = [ChunkRef(block_id, chunk_id) for block_id in range(3) for chunk_id in range(2 if block_id < 2 else 1)]
"""Blocks of 4, 4 and 3 samples, in chunks of 3."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    (folder / "data.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    ingest(folder / "data.jsonl", folder / "blocks", block_size=4)
    return folder / "blocks"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def feed(store: Path, tokenizer: Tokenizer) -> ChunkFeed:
    return new_feed(store, tokenizer)


def new_feed(store: Path, tokenizer: Tokenizer, batch_size: int = 2) -> ChunkFeed:
    blocks = BlockManager(store, dataset_chunk_size=3)
    return ChunkFeed(blocks, tokenizer, batch_size=batch_size, sequence_length=8)


def assert_same(some: list[Batch], others: list[Batch]) -> None:
    for one, other in zip(some, others, strict=True):
        for name in Batch.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_every_sample_of_the_store_ends_in_one_batch_in_order(feed: ChunkFeed) -> None:
    found = [batch.sample_ids for ref in CHUNKS for batch in feed.batches(ref)]
    assert np.concatenate(found).tolist() == list(range(len(TEXTS)))


def test_the_tokens_of_a_span_are_those_of_its_sample(feed: ChunkFeed, tokenizer: Tokenizer) -> None:
    pieces: dict[int, list[int]] = {number: [] for number in range(len(TEXTS))}
    for batch in (batch for ref in CHUNKS for batch in feed.batches(ref)):
        tokens = iter(batch.input_ids[batch.document_ids >= 0].tolist())
        for sample_id, start, stop in batch.spans.tolist():
            assert start == len(pieces[sample_id])
            pieces[sample_id] += [next(tokens) for _ in range(start, stop)]
        assert list(tokens) == []
    engine = tokenizers.Tokenizer.from_str(tokenizer.definition)
    assert [engine.decode(tokens[:-1]) for tokens in pieces.values()] == TEXTS
    assert {tokens[-1] for tokens in pieces.values()} == {tokenizer.end_of_text_id}


def test_a_chunk_is_the_same_on_every_call_and_from_every_feed(
    feed: ChunkFeed, store: Path, tokenizer: Tokenizer
) -> None:
    for ref in CHUNKS:
        first = list(feed.batches(ref))
        assert first
        assert_same(list(feed.batches(ref)), first)
        assert_same(list(new_feed(store, tokenizer).batches(ref)), first)


def test_a_chunk_resumed_between_two_batches_goes_on_with_the_next(feed: ChunkFeed) -> None:
    for ref in CHUNKS:
        whole = list(feed.batches(ref))
        for done, batch in enumerate(whole, 1):
            assert_same(list(feed.batches(ref, batch.stop_offset)), whole[done:])


def test_samples_done_of_the_last_batch_is_the_chunks_sample_count(feed: ChunkFeed) -> None:
    assert [list(feed.batches(ref))[-1].samples_done for ref in CHUNKS] == [3, 1, 3, 1, 3]


def test_padding_is_end_of_text_and_marked(feed: ChunkFeed, tokenizer: Tokenizer) -> None:
    padded = [batch for ref in CHUNKS for batch in feed.batches(ref) if (batch.document_ids == -1).any()]
    assert padded
    for batch in padded:
        assert set(batch.input_ids[batch.document_ids == -1].tolist()) == {tokenizer.end_of_text_id}


def test_a_chunk_that_does_not_exist_is_refused(feed: ChunkFeed) -> None:
    with pytest.raises(BlockStoreError, match="block 2 has no chunk 1"):
        feed.window(ChunkRef(2, 1))


def test_a_batch_without_room_for_a_sequence_is_refused(store: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="batch_size=0 holds no sequence: expected 1 or more"):
        new_feed(store, tokenizer, batch_size=0)


def token_store(folder: Path, rows: list[list[int]]) -> Path:
    (folder / "tokens.jsonl").write_bytes(b"".join(orjson.dumps({"input_ids": ids}) + b"\n" for ids in rows))
    ingest(folder / "tokens.jsonl", folder / "tokens", block_size=4)
    return folder / "tokens"


def test_samples_that_came_tokenised_are_packed_as_they_are(
    tmp_path: Path, feed: ChunkFeed, tokenizer: Tokenizer
) -> None:
    encoded = tokenizer.encode(TEXTS)
    bounds = zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)
    store = token_store(tmp_path, [encoded.ids[start:stop].tolist() for start, stop in bounds])
    tokens_feed = new_feed(store, tokenizer)
    for ref in CHUNKS:
        assert_same(list(tokens_feed.batches(ref)), list(feed.batches(ref)))


def test_tokens_the_tokenizer_does_not_have_are_refused_with_their_sample(tmp_path: Path, tokenizer: Tokenizer) -> None:
    store = token_store(tmp_path, [[1, 2], [3], [4], [5, 6], [7], [8, tokenizer.vocab_size, 9]])
    feed = new_feed(store, tokenizer)
    assert [batch.sample_ids.tolist() for batch in feed.batches(ChunkRef(0, 0))] == [[0, 1, 2]]
    with pytest.raises(ConfigError, match=rf"sample 5 holds token {tokenizer.vocab_size}, the tokenizer has"):
        feed.window(ChunkRef(1, 0))

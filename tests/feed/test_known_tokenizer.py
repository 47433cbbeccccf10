"""Notes of tokenizers: a feed from a full cache loads none, and never takes one for another."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from penstock.blocks import BlockManager, ingest
from penstock.errors import ConfigError
from penstock.feed import Tokenizer, train_tokenizer
from penstock.feed.known_tokenizer import KnownTokenizer, know_tokenizer
from penstock.feed.loader import DistributedLoader

TEXTS = [f"sample {number} " + "word " * (number % 17) for number in range(60)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "raw.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    ingest(tmp_path / "raw.jsonl", tmp_path / "store", 20)
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, vocab_size=290).definition)
    return tmp_path / "store"


def batches(store: Path) -> list[list[int]]:
    loader = DistributedLoader(store, 4, tokenizer=store.parent / "tokenizer.json", sequence_length=16)
    return [row for batch in loader for row in batch["input_ids"].tolist()]


def test_a_second_feed_loads_no_tokenizer_and_gives_the_same(store: Path) -> None:
    first = batches(store)
    program = f"""
import sys
from penstock import DistributedLoader
loader = DistributedLoader({str(store)!r}, 4, tokenizer={str(store.parent / "tokenizer.json")!r}, sequence_length=16)
print([row for batch in loader for row in batch["input_ids"].tolist()])
print(sorted({{"torch", "tokenizers", "gigatoken", "pyarrow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    told, loaded = done.stdout.splitlines()
    assert told == str(first)
    assert loaded == "[]"


def test_what_is_known_is_what_the_tokenizer_says(store: Path) -> None:
    blocks, path = BlockManager(store), str(store.parent / "tokenizer.json")
    loaded = know_tokenizer(path, blocks)
    assert isinstance(loaded, Tokenizer)
    known = know_tokenizer(path, blocks)
    assert isinstance(known, KnownTokenizer)
    for name in ("fingerprint", "engine", "vocab_size", "end_of_text", "end_of_text_id", "definition"):
        assert getattr(known, name) == getattr(loaded, name)
    copy = pickle.loads(pickle.dumps(known))  # noqa: S301 - our own
    assert copy.encode(["word"]).ids.tolist() == loaded.encode(["word"]).ids.tolist()


def test_a_tokenizer_that_was_changed_is_another_one(store: Path) -> None:
    before = batches(store)
    path = store.parent / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS[:9], vocab_size=280).definition)
    assert isinstance(know_tokenizer(str(path), BlockManager(store)), Tokenizer)
    assert batches(store) != before
    (store.parent / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert isinstance(know_tokenizer(str(path), BlockManager(store)), Tokenizer)


def test_one_that_changes_behind_the_notes_back_is_refused(store: Path) -> None:
    path = store.parent / "tokenizer.json"
    know_tokenizer(str(path), BlockManager(store))
    known = know_tokenizer(str(path), BlockManager(store))
    path.write_text(train_tokenizer(TEXTS[:9], vocab_size=280).definition)
    with pytest.raises(ConfigError, match="is not the one that the token cache was begun with"):
        known.encode(["word"])


def test_a_damaged_note_is_as_good_as_none(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = batches(store)
    (note,) = (store / "tokens" / "tokenizers").iterdir()
    for content in (b"", b"{", b'{"engine": 1}', b"[]"):
        note.write_bytes(content)
        assert batches(store) == first
    assert "cannot be read" in caplog.text

"""`penstock tokenize` and `penstock bench feed`."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.feed import train_tokenizer

TEXTS = [f"sample {number}: " + "word " * (number % 23) for number in range(100)]


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS))
    return tmp_path / "a.jsonl"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, vocab_size=300).definition)
    return tmp_path / "tokenizer.json"


def told(*arguments: str | Path | int) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_tokenising_ahead_says_what_it_made_and_a_second_time_makes_nothing(raw: Path, tokenizer: Path) -> None:
    first = json.loads(told("tokenize", raw, "--tokenizer", tokenizer, "--json"))
    assert (first["samples"], first["engine"]) == (100, "gigatoken")
    assert first["tokens"] > 1000
    segments = Path(first["folder"], "segments")
    before = {path: path.stat().st_size for path in segments.iterdir()}
    again = json.loads(told("tokenize", raw, "--tokenizer", tokenizer.parent, "--json"))
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    assert {path: path.stat().st_size for path in segments.iterdir()} == before


def test_the_feed_is_measured_with_loading_included(raw: Path, tokenizer: Path) -> None:
    packed = json.loads(
        told("bench", "feed", raw, "--tokenizer", tokenizer, "--sequence-length", 32, "--batch-size", 4, "--json")
    )
    assert packed["batches"] > 5
    names = {"tokens_per_s", "first_batch_s", "peak_memory_mb", "batch_p50_s", "batch_p99_s", "total_s"}
    split = {"wait_p50_s", "wait_p99_s", "wait_share", "fetch_s", "decode_s", "tokenise_s", "pack_s", "queue_s"}
    assert names | split <= packed.keys()
    assert all(value >= 0 for value in packed.values())
    assert packed["tokenise_s"] > 0
    texts = json.loads(told("bench", "feed", raw, "--batches", 3, "--json"))
    assert texts["batches"] == 3
    assert texts["characters_per_s"] > 0
    assert "tokens per" not in told("bench", "feed", raw)


def test_a_tokenizer_that_is_none_is_named(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json' cannot be read: No such file"):
        told("tokenize", raw, "--tokenizer", tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json: not a tokenizer\.json"):
        told("tokenize", raw, "--tokenizer", tmp_path / "other.json")


def test_chats_are_tokenised_ahead_for_fine_tuning(tmp_path: Path, tokenizer: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 20)
    chosen = ("--tokenizer", tokenizer, "--learn", "assistant", "--chat-template", "plain")
    made = json.loads(told("tokenize", tmp_path / "chats.jsonl", *chosen, "--json"))
    assert made["samples"] == 20
    fed = told(
        "bench", "feed", tmp_path / "chats.jsonl", *chosen, "--packing", "best-fit", "--sequence-length", 32, "--json"
    )
    assert json.loads(fed)["tokenise_s"] == 0, "from the cache"
    with pytest.raises(ConfigError, match="--learn user is unknown"):
        told("tokenize", tmp_path / "chats.jsonl", "--tokenizer", tokenizer, "--learn", "user")

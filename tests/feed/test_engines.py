"""Engines: the fast one is taken where it gives the reference's ids, and only there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.feed import Tokenizer, choose_engine, train_tokenizer
from penstock.feed.engines import GigatokenEngine, ReferenceEngine, make_engine

TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 3, "naïve café — 東京", "def f(x):\n\treturn x + 1\n"]


@pytest.fixture(scope="module")
def definition() -> str:
    return train_tokenizer(TEXTS, vocab_size=320).definition


def changed(definition: str, change: Callable[[dict[str, Any]], object]) -> str:
    fields = json.loads(definition)
    change(fields)
    return json.dumps(fields)


def test_the_fast_engine_is_chosen_where_it_gives_the_same_ids(definition: str) -> None:
    assert choose_engine(definition, TEXTS) == "gigatoken"


@given(texts=st.lists(st.text(max_size=40), max_size=6))
def test_both_engines_give_the_same_ids_for_any_text(definition: str, texts: list[str]) -> None:
    reference = Tokenizer(definition).encode(texts)
    fast = Tokenizer(definition, engine="gigatoken").encode(texts)
    np.testing.assert_array_equal(fast.ids, reference.ids)
    np.testing.assert_array_equal(fast.offsets, reference.offsets)


def test_special_tokens_in_a_text_are_letters_to_both(definition: str) -> None:
    for engine in (ReferenceEngine(definition), GigatokenEngine(definition)):
        ids, _ = engine.encode(["a <|endoftext|> b"])
        assert 0 not in ids.tolist(), engine.name


def test_both_know_the_same_special_tokens_however_the_definition_is_written(definition: str) -> None:
    def hide(fields: dict[str, Any]) -> None:  # the name of the list stands for a token as well
        fields["model"]["vocab"] = {**fields["model"]["vocab"], "added_tokens": len(fields["model"]["vocab"])}

    for written in (changed(definition, hide), json.dumps(json.loads(definition), separators=(" ,\n", " :\n"))):
        size = Tokenizer(written).vocab_size
        assert Tokenizer(written, engine="gigatoken").vocab_size == size
        for engine in (ReferenceEngine(written), GigatokenEngine(written)):
            assert 0 not in engine.encode(["a <|endoftext|> b"])[0].tolist(), engine.name


def test_words_that_were_added_are_words_to_both(definition: str) -> None:
    word_id = Tokenizer(definition).vocab_size

    def add(fields: dict[str, Any]) -> None:
        token = {"id": word_id, "content": "quick brown", "special": False, "single_word": False}
        fields["added_tokens"].append({**token, "lstrip": False, "rstrip": False, "normalized": False})

    with_word = changed(definition, add)
    for engine in (ReferenceEngine(with_word), GigatokenEngine(with_word)):
        assert word_id in engine.encode(TEXTS)[0].tolist(), engine.name


def test_a_tokenizer_the_fast_engine_does_not_know_is_left_to_the_reference(
    definition: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "the": 1, "<unk>": 2}, "unk_token": "<unk>"}
    other = changed(definition, lambda fields: fields.update(model=words))
    with caplog.at_level(logging.WARNING):
        assert choose_engine(other, TEXTS) == "tokenizers"
    assert "tokenizers, which is slower" in caplog.text


def test_other_ids_are_told_with_the_text_they_differ_in(
    definition: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = GigatokenEngine.encode

    def one_off(self: GigatokenEngine, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = encode(self, texts)
        ids = ids.copy()
        ids[-1] += 1
        return ids, offsets

    monkeypatch.setattr(GigatokenEngine, "encode", one_off)
    with caplog.at_level(logging.WARNING):
        assert choose_engine(definition, TEXTS) == "tokenizers"
    assert "def f(x)" in caplog.text


def test_the_fingerprint_names_the_engine(definition: str) -> None:
    fast, reference = Tokenizer(definition, engine="gigatoken"), Tokenizer(definition)
    assert (fast.engine, reference.engine) == ("gigatoken", "tokenizers")
    assert fast.fingerprint != reference.fingerprint


def test_an_unknown_engine_is_refused(definition: str) -> None:
    with pytest.raises(ConfigError, match="engine='abacus' is unknown: expected 'tokenizers' or 'gigatoken'"):
        make_engine("abacus", definition)  # pyright: ignore[reportArgumentType]

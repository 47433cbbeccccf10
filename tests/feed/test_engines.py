"""Engines: the fast one is taken where it gives the reference's ids, and only there."""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.feed import Tokenizer, choose_engine, engines, train_tokenizer
from penstock.feed.engines import _HARD_TEXTS, GigatokenEngine, ReferenceEngine, make_engine

TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 3, "naïve café — 東京", "def f(x):\n\treturn x + 1\n"]


@pytest.fixture(scope="module")
def definition() -> str:
    return train_tokenizer(TEXTS, vocab_size=320).definition


@pytest.fixture(scope="module", params=[0, 1 << 40], ids=["in awkward arrays", "in rows"])
def fast(definition: str, request: pytest.FixtureRequest) -> Iterator[GigatokenEngine]:
    """The fast engine, by the way in which its ids come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "_FIRST_BYTES", request.param)
        yield GigatokenEngine(definition)


def changed(definition: str, change: Callable[[dict[str, Any]], object]) -> str:
    fields = json.loads(definition)
    change(fields)
    return json.dumps(fields)


def test_the_fast_engine_is_chosen_where_it_gives_the_same_ids(definition: str) -> None:
    assert choose_engine(definition, TEXTS) == "gigatoken"


@given(texts=st.lists(st.text(max_size=40), max_size=6))
def test_both_engines_give_the_same_ids_for_any_text(definition: str, fast: GigatokenEngine, texts: list[str]) -> None:
    reference = Tokenizer(definition)
    ids, offsets = fast.encode(texts, end=reference.end_of_text_id)
    expected = reference.encode(texts)
    np.testing.assert_array_equal(ids, expected.ids)
    np.testing.assert_array_equal(offsets, expected.offsets)


LOTS = {
    "nothing": [],
    "empty texts": ["", "", ""],
    "hard texts": [*_HARD_TEXTS, *TEXTS],
    "many tiny texts": [TEXTS[number % 3][: number % 50] for number in range(20_000)],
    "a large text among small ones": ["", "a", "\u6771\u4eac " * 150_000, *TEXTS, "b" * 40_000, ""],
}


@pytest.mark.parametrize("lot", LOTS)
def test_ids_are_the_references_however_they_come(definition: str, fast: GigatokenEngine, lot: str) -> None:
    reference, texts = ReferenceEngine(definition), LOTS[lot]
    for end, dtype in ((None, np.uint32), (0, np.uint16)):
        got, expected = (engine.encode(texts, end=end, dtype=dtype) for engine in (fast, reference))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


def test_what_comes_first_needs_no_awkward_and_what_comes_later_does(definition: str) -> None:
    program = """
import sys
from penstock.feed import choose_engine, engines

definition = sys.stdin.read()
engines._FIRST_BYTES = 1_000
assert choose_engine(definition, ["a text"]) == "gigatoken"
engine = engines.GigatokenEngine(definition)
for _ in range(2):
    engine.encode(["a text"] * 10)
    print("awkward" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, input=definition, capture_output=True, text=True, timeout=120, check=True).stdout
    assert told.split() == ["False", "True"]


def test_threads_and_forked_children_share_the_fast_engine(fast: GigatokenEngine) -> None:
    texts = TEXTS * 500
    expected = fast.encode(texts)[0].tolist()
    with ThreadPoolExecutor(4) as threads:
        assert [ids.tolist() for ids, _ in threads.map(lambda _: fast.encode(texts), range(12))] == [expected] * 12
    forking = multiprocessing.get_context("fork")
    told, tell = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: tell.send(fast.encode(texts)[0].tolist()), daemon=True)
    child.start()
    try:
        assert told.poll(60), "the child hangs"
        assert told.recv() == expected
    finally:
        child.kill()
        child.join()


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

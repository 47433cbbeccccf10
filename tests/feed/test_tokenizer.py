"""The tokenizer: nothing is lost in it, every document is closed, and its fingerprint is its identity."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from equipment.processes import pickled, python, run
from penstock.errors import ConfigError
from penstock.feed import Tokenizer, train_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 3, "naïve café — 東京", "def f(x):\n\treturn x + 1\n"]

TRAIN = f"""
from penstock.feed import train_tokenizer
print(train_tokenizer({TEXTS!r}, vocab_size=300).fingerprint)
"""

ENCODE = f"""
import pickle, sys
tokenizer = pickle.loads(bytes.fromhex(sys.argv[1]))
print(tokenizer.fingerprint, tokenizer.end_of_text_id, tokenizer.encode({TEXTS!r}).ids.tolist(), sep="\\n")
"""


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizers.Tokenizer.from_str(tokenizer.definition).decode(ids, skip_special_tokens=False)


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], object]) -> str:
    """Another definition: this one, with something in it changed."""
    definition = json.loads(tokenizer.definition)
    change(definition)
    return json.dumps(definition)


# -- text in, ids out -------------------------------------------------------------------------------------------------


@given(texts=st.lists(st.text(max_size=20), max_size=5))
def test_every_text_comes_back_from_its_ids(trained: Tokenizer, texts: list[str]) -> None:
    encoded = trained.encode(texts)
    bounds = zip(encoded.offsets[:-1].tolist(), encoded.offsets[1:].tolist(), strict=True)
    assert [decoded(trained, encoded.ids[start : stop - 1].tolist()) for start, stop in bounds] == texts


@pytest.mark.parametrize(
    "text", ["", " ", "\x00\x7f\r\n", "👩‍👩‍👧‍👦 🇩🇪 ✋🏿", "e\u0301 é \ufeff\u200b", "\U0010ffff", "a" * 5000]
)
def test_odd_texts_come_back_from_their_ids(trained: Tokenizer, text: str) -> None:
    encoded = trained.encode([text])
    assert decoded(trained, encoded.ids[:-1].tolist()) == text


@given(texts=st.lists(st.text(max_size=20), max_size=5))
def test_every_document_is_closed_by_end_of_text_and_by_nothing_else(trained: Tokenizer, texts: list[str]) -> None:
    encoded = trained.encode(texts)
    ends = encoded.offsets[1:] - 1
    assert (encoded.ids == trained.end_of_text_id).nonzero()[0].tolist() == ends.tolist()
    assert encoded.offsets[0] == 0
    assert encoded.offsets[-1] == len(encoded.ids)


@given(texts=st.lists(st.text(max_size=20), max_size=5))
def test_a_text_is_encoded_the_same_alone_and_among_others(trained: Tokenizer, texts: list[str]) -> None:
    together = trained.encode(texts).ids.tolist()
    assert together == [token for text in texts for token in trained.encode([text]).ids.tolist()]


def test_threads_may_share_a_tokenizer(trained: Tokenizer) -> None:
    expected = trained.encode(TEXTS * 50).ids.tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: trained.encode(TEXTS * 50).ids.tolist(), range(8)))
    assert found == [expected] * 8


def test_truncation_padding_and_templates_of_the_definition_do_not_touch_the_ids(trained: Tokenizer) -> None:
    engine = tokenizers.Tokenizer.from_str(trained.definition)
    engine.enable_truncation(2)
    engine.enable_padding(length=50)
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    assert Tokenizer(engine.to_str()).encode(TEXTS).ids.tolist() == trained.encode(TEXTS).ids.tolist()


# -- identity ---------------------------------------------------------------------------------------------------------


def test_training_twice_gives_the_same_tokenizer_in_any_process(trained: Tokenizer) -> None:
    assert train_tokenizer(iter(TEXTS), vocab_size=300).definition == trained.definition
    for seed, threads in (("1", "1"), ("2", "2")):
        finished = run(python(TRAIN), env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads})
        assert finished.output == trained.fingerprint + "\n"


def test_the_fingerprint_changes_with_the_definition(trained: Tokenizer) -> None:
    same = Tokenizer(trained.definition)
    other = train_tokenizer([*TEXTS, "zebra zebra zebra zebra"], vocab_size=300)
    spaced = Tokenizer(changed(trained, lambda definition: definition["pre_tokenizer"].update(add_prefix_space=True)))
    assert same.fingerprint == trained.fingerprint
    assert len({trained.fingerprint, other.fingerprint, spaced.fingerprint}) == 3


def test_the_fingerprint_changes_with_the_end_of_text(trained: Tokenizer) -> None:
    assert Tokenizer(trained.definition, end_of_text="a").fingerprint != trained.fingerprint


def test_a_pickled_tokenizer_is_the_same_tokenizer_in_another_process(trained: Tokenizer) -> None:
    for original in (trained, Tokenizer(trained.definition, end_of_text="a")):
        finished = run(python(ENCODE, pickled(original)))
        expected = [original.fingerprint, str(original.end_of_text_id), str(original.encode(TEXTS).ids.tolist())]
        assert finished.output.splitlines() == expected


def test_the_vocabulary_is_as_large_as_asked_for_and_holds_every_id(trained: Tokenizer) -> None:
    large = train_tokenizer(TEXTS * 20, vocab_size=270)
    assert large.vocab_size == 270
    assert trained.encode(TEXTS).ids.max() < trained.vocab_size


def test_a_vocabulary_with_gaps_has_room_for_its_highest_id() -> None:
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 2, "word": 90}, unk_token="</s>"))
    tokenizer = Tokenizer(engine.to_str())
    assert tokenizer.encode(["word"]).ids.tolist() == [90, 2]
    assert tokenizer.vocab_size == 91


# -- end of text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>"])
def test_the_usual_ends_of_text_are_found(trained: Tokenizer, known: str) -> None:
    tokenizer = Tokenizer(trained.definition.replace("<|endoftext|>", known))
    assert (tokenizer.end_of_text, tokenizer.end_of_text_id) == (known, 0)


def test_an_end_of_text_can_be_named(trained: Tokenizer) -> None:
    tokenizer = Tokenizer(trained.definition.replace("<|endoftext|>", "<fin>"), end_of_text="<fin>")
    assert tokenizer.encode([""]).ids.tolist() == [0]


def test_an_end_of_text_that_the_tokenizer_does_not_know_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"knows none of <fin>: name its end-of-text token"):
        Tokenizer(trained.definition, end_of_text="<fin>")
    with pytest.raises(ConfigError, match=r"knows none of <\|endoftext\|>, </s>, .*: name its end-of-text token"):
        Tokenizer(trained.definition.replace("<|endoftext|>", "<fin>"))


# -- what cannot work -------------------------------------------------------------------------------------------------

BAD: dict[str, Callable[[Tokenizer], str]] = {
    "nothing": lambda _: "",
    "no object": lambda _: "[]",
    "no model": lambda _: "{}",
    "cut off": lambda tokenizer: tokenizer.definition[:500],
    "a model that does not exist": lambda tokenizer: changed(tokenizer, lambda it: it["model"].update(type="Oracle")),
    "merges of unknown tokens": lambda tokenizer: changed(
        tokenizer, lambda it: it["model"].update(merges=[["zz", "q"]])
    ),
    "an expression that does not parse": lambda tokenizer: changed(
        tokenizer, lambda it: it.update(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""})
    ),
    "what makes the engine panic": lambda tokenizer: changed(
        tokenizer, lambda it: it.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_definition_is_refused_with_a_sentence(trained: Tokenizer, what: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^not a tokenizer\.json: .+: expected a file written by the tokenizers library"
    ):
        Tokenizer(BAD[what](trained))


def test_a_text_that_the_tokenizer_cannot_encode_is_refused_with_a_sentence() -> None:
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}, unk_token="<unk>"))
    with pytest.raises(ConfigError, match=r"the tokenizer cannot encode a text: .*: name a tokenizer that can"):
        Tokenizer(engine.to_str()).encode(["word"])


@pytest.mark.parametrize("vocab_size", [0, 256])
def test_a_vocabulary_without_room_for_every_byte_is_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size={vocab_size} has no room for the 257 bytes and end of text"):
        train_tokenizer(TEXTS, vocab_size=vocab_size)


def test_an_end_of_text_written_in_a_text_ends_nothing() -> None:
    tokenizer = train_tokenizer(["some words to learn from"] * 3, vocab_size=300)
    encoded = tokenizer.encode([f"before {tokenizer.end_of_text} after"])
    assert (encoded.ids == tokenizer.end_of_text_id).sum() == 1
    assert encoded.ids[-1] == tokenizer.end_of_text_id


@pytest.mark.parametrize("length", [3, 4_000])
def test_every_text_is_closed_whether_long_or_short(length: int) -> None:
    texts = [f"{number} abc " * length for number in range(5)] + ["", "x"]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    encoded = tokenizer.encode(texts, np.uint16)
    assert encoded.ids.dtype == np.uint16
    for number, text in enumerate(texts):
        alone, _ = tokenizer.encode_plain([text])
        found = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
        assert found.tolist() == [*alone.tolist(), tokenizer.end_of_text_id]

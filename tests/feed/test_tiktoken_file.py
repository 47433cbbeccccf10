"""tiktoken files: converted, they give tiktoken's ids for every text, whatever the vocabulary."""

from __future__ import annotations

import base64
import json
import os
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.feed import Tokenizer, choose_engine, train_tokenizer
from penstock.feed.encodings import ENCODINGS, KNOWN
from penstock.feed.engines import ReferenceEngine
from penstock.feed.loading import load_tokenizer
from penstock.feed.tiktoken_file import _byte_letters, convert_tiktoken, find_encoding, find_merges, parse_ranks

TEXTS = [
    "the quick brown fox jumps over the lazy dog\n" * 3,
    "naïve café — 東京, e\u0301 \ufb01 \u1e9e \u0130 \u212b",
    "def f(x):\n\treturn x + 1  # don't, WE'LL, I'VE, it'\u017f\r\n\r\n   \n",
    "1234567 3.14159 ١٢٣ ⅷ 1,000,000 a1b2",
    " \u00a0\u3000x\x00\x1c\x85\u200b\u2028 ",
    "👩‍👩‍👧‍👦 🇩🇪 ✋🏿 <|endoftext|></s>\ufeff\U0010ffff",
    "HTTPServer camelCase ÀÉÎ ǅ ʰ \u0301a / // \n/",
    "    " * 40 + "x" * 700 + "\n" * 30,
]
HERE = os.environ.get("PENSTOCK_TIKTOKEN_FILES", "")
"""A folder with published tiktoken files, for those who have them."""

ORIGINAL_PATTERNS = {
    "r50k_base": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
}
"""As tiktoken has them now; the others are spelled here as they are there."""


def spelled(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def bytes_first(*tokens: bytes) -> dict[bytes, int]:
    """Every byte, and these tokens behind them."""
    return {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *tokens])}


def original(ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding("any", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def ids_of(definition: str, texts: list[str]) -> list[list[int]]:
    ids, offsets = ReferenceEngine(definition).encode(texts)
    return [ids[start:stop].tolist() for start, stop in pairwise(offsets.tolist())]


@pytest.fixture(scope="module")
def trained() -> dict[bytes, int]:
    """A vocabulary that was learned, as a real one is."""
    vocab = json.loads(train_tokenizer(TEXTS * 3, vocab_size=700).definition)["model"]["vocab"]
    of_letter = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokens = [token for token in sorted(vocab, key=vocab.get) if token != "<|endoftext|>"]
    return {bytes(of_letter[letter] for letter in token): rank for rank, token in enumerate(tokens)}


# -- the same ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_a_learned_vocabulary_gives_the_same_ids_under_every_pattern(trained: dict[bytes, int], name: str) -> None:
    definition, _ = convert_tiktoken(spelled(trained), "a.tiktoken", name)
    encoding = original(trained, ORIGINAL_PATTERNS.get(name, ENCODINGS[name].pattern))
    form = ENCODINGS[name].normalizer
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS] if form else TEXTS
    assert ids_of(definition, TEXTS) == [encoding.encode_ordinary(text) for text in texts]
    assert choose_engine(definition, TEXTS) == "gigatoken"


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), name=st.sampled_from(["r50k_base", "cl100k_base", "o200k_base"]))
def test_any_text_gives_the_same_ids(converted: dict[str, Tokenizer], text: str, name: str) -> None:
    encoding = converted[f"{name} original"]
    assert converted[name].encode([text]).ids[:-1].tolist() == encoding.encode_ordinary(text)  # pyright: ignore


@pytest.fixture(scope="module")
def converted(trained: dict[bytes, int]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name in ("r50k_base", "cl100k_base", "o200k_base"):
        definition, end = convert_tiktoken(spelled(trained), "a.tiktoken", name)
        made[name] = Tokenizer(definition, end_of_text=end, engine="gigatoken")
        made[f"{name} original"] = original(trained, ORIGINAL_PATTERNS.get(name, ENCODINGS[name].pattern))
    return made


tables = st.lists(st.text("abc", min_size=2, max_size=6).map(str.encode), min_size=0, max_size=25, unique=True).flatmap(
    st.permutations
)


@settings(max_examples=300, deadline=None)
@given(tokens=tables, texts=st.lists(st.text("abc", max_size=30), max_size=5), early=st.booleans())
def test_any_table_of_ranks_gives_the_same_ids(tokens: list[bytes], texts: list[str], early: bool) -> None:
    """Also one that nobody would learn: where a part ranks behind the whole, and where a token cannot be made."""
    ranks = bytes_first(*tokens)
    if early:
        ranks = {token: (rank + len(tokens)) % len(ranks) for token, rank in ranks.items()}
    definition, _ = convert_tiktoken(spelled(ranks), "a.tiktoken", "r50k_base")
    encoding = original(ranks, ENCODINGS["r50k_base"].pattern)
    assert ids_of(definition, texts) == [encoding.encode_ordinary(text) for text in texts]


def test_a_token_that_no_merge_makes_is_found_where_it_is_a_whole_word() -> None:
    ranks = bytes_first(b"bc", b"ab", b"abc", b"xyz")
    assert find_merges(ranks) == ([(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")], 1)
    definition, _ = convert_tiktoken(spelled(ranks), "a.tiktoken", "r50k_base")
    encoding = original(ranks, ENCODINGS["r50k_base"].pattern)
    assert ids_of(definition, ["xyz", "xyzz", "abc ab"]) == [
        encoding.encode_ordinary(t) for t in ("xyz", "xyzz", "abc ab")
    ]
    assert ids_of(definition, ["xyz"]) == [[259]]


@pytest.mark.parametrize("name", sorted(set(KNOWN.values())))
def test_a_published_file_gives_the_same_ids(name: str) -> None:
    path = Path(HERE, f"{name}.tiktoken")
    if not HERE or not path.exists():
        pytest.skip("no such file: PENSTOCK_TIKTOKEN_FILES names no folder with it")
    tokenizer = load_tokenizer(str(path))
    ranks = parse_ranks(path.read_bytes(), str(path))
    encoding = ENCODINGS[name]
    reference = original(ranks, ORIGINAL_PATTERNS.get(name, encoding.pattern))
    points = "".join(f"a{chr(point)}b {chr(point)}1{chr(point)}, " for point in range(0x20, 0x2FFF))
    for text in [*TEXTS, points, Path(__file__).read_text()]:
        wanted = unicodedata.normalize("NFC", text) if encoding.normalizer else text
        assert tokenizer.encode([text]).ids[:-1].tolist() == reference.encode_ordinary(wanted)
    assert tokenizer.vocab_size == max(encoding.special_tokens.values(), default=0) + 1 or name == "p50k_base"
    assert tokenizer.end_of_text_id == encoding.special_tokens[encoding.end_of_text]


# -- special tokens and patterns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_special_tokens_have_ids_of_their_own_behind_the_vocabulary(name: str) -> None:
    encoding = ENCODINGS[name]
    assert encoding.end_of_text in encoding.special_tokens
    assert len(set(encoding.special_tokens.values())) == len(encoding.special_tokens)


def test_special_tokens_stand_where_their_makers_put_them() -> None:
    found = {name: ENCODINGS[name].special_tokens for name in ENCODINGS}
    assert found["cl100k_base"]["<|fim_suffix|>"] == 100260
    assert found["llama3"]["<|eot_id|>"] == 128009
    assert (found["llama3"]["<|reserved_special_token_245|>"], len(found["llama3"])) == (128255, 256)
    assert found["llama4"]["<|image_start|>"] == 200080
    assert found["llama4"]["<|finetune_right_pad|>"] == 200018
    assert (found["llama4"]["<|reasoning_thinking_end|>"], len(found["llama4"])) == (201143, 2048)
    assert found["qwen"]["<|im_end|>"] == 151645


def test_a_vocabulary_of_ones_own_ends_texts_behind_all_it_has(tmp_path: Path) -> None:
    ranks = bytes_first(b"th", b"the")
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(spelled(ranks))
    tokenizer = load_tokenizer(f"{path}?encoding=cl100k_base")
    assert (tokenizer.end_of_text, tokenizer.end_of_text_id, tokenizer.vocab_size) == ("<|endoftext|>", 258, 259)
    assert tokenizer.encode(["the"]).ids.tolist() == [257, 258]
    other = load_tokenizer(f"{path}?encoding=cl100k_base&end_of_text=a")
    assert other.end_of_text_id == ord("a")


def test_a_vocabulary_nobody_knows_is_refused_with_what_to_give(tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(spelled(bytes_first(b"th")))
    with pytest.raises(
        ConfigError, match=r"does not say how it cuts .*: name the encoding .*mine\.tiktoken\?encoding="
    ):
        load_tokenizer(str(path))
    with pytest.raises(ConfigError, match="encoding='base64' is unknown: expected one of cl100k_base, gpt2, llama3"):
        load_tokenizer(f"{path}?encoding=base64")


def test_a_known_vocabulary_is_recognised_whatever_the_order_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = bytes_first(b"th")
    from penstock.feed import tiktoken_file

    monkeypatch.setitem(tiktoken_file.KNOWN, tiktoken_file._digest(ranks), "qwen")
    shuffled = dict(reversed(ranks.items()))
    assert find_encoding(shuffled, "a")[0] is ENCODINGS["qwen"]
    with pytest.raises(ConfigError, match="is the vocabulary of qwen, not of gpt2: leave encoding=gpt2 away"):
        find_encoding(ranks, "a", "gpt2")


# -- what is no such file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"dGhl", r":257 is b'dGhl': expected a token in base64, a space and its rank"),
        (b"dGhl x", r":257 is b'dGhl x': expected"),
        (b"dGhl 256 7", r":257 is b'dGhl 256 7': expected"),
        (b"*** 256", r":257 is b'\*\*\* 256': expected"),
        (b"YQ== 256", r":257 has the token b'a' a second time"),
        (b"dGhl 97", r"gives one rank to several tokens"),
        (b"dGhl 9999999999", r"gives one rank to several tokens, or one above 2147483647"),
        (b"dGhl 99999999999999999999", r":257 is"),
    ],
)
def test_a_damaged_line_is_named(line: bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        convert_tiktoken(spelled(bytes_first()) + line + b"\n", "a.tiktoken", "gpt2")


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no token for 156 of the 256 bytes \(the first: 100\): it is cut off"):
        convert_tiktoken(spelled({bytes([byte]): byte for byte in range(100)}), "a.tiktoken", "gpt2")
    (tmp_path / "a.tiktoken").write_bytes(b"")
    with pytest.raises(ConfigError, match="has no token for 256 of the 256 bytes"):
        load_tokenizer(str(tmp_path / "a.tiktoken"))

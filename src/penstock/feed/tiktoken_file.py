"""A tiktoken file as a `tokenizer.json`: the same ids for every text.

    base64 token, rank ──► ranks ──► merges ──► byte-level BPE, cut by the encoding's pattern, with its special tokens

tiktoken joins whichever two neighbours make the token of the lowest rank; `tokenizers` joins the two that a list of
merges names. A token can only come about in one way: everything inside it was joined without regard to what stands
around it, as if it stood alone. So each token is encoded alone, and the last two parts are its merge. A token that does
not come about so is found by tiktoken only where it is a whole word, which `tokenizers` does with `ignore_merges`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any

from penstock.errors import ConfigError
from penstock.feed.encodings import ENCODINGS, GPT2, KNOWN, Encoding

_LARGEST_ID = 2**31 - 1


def looks_like_tiktoken(data: bytes) -> bool:
    """Whether these are lines of base64 and a number: Llama's `tokenizer.model` is, SentencePiece's is not."""
    line = data[:4096].lstrip().partition(b"\n")[0].split()
    return len(line) == 2 and line[1].isdigit() and _decoded(line[0]) is not None


def parse_ranks(data: bytes, what: str) -> dict[bytes, int]:
    """Tokens with their ids; every single byte is among them, no token and no id twice."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split()
        token = _decoded(parts[0])
        if len(parts) != 2 or not token or not parts[1].isdigit() or len(parts[1]) > 10:
            raise ConfigError(f"{what}:{number} is {line[:60]!r}: expected a token in base64, a space and its rank")
        if token in ranks:
            raise ConfigError(f"{what}:{number} has the token {token!r} a second time: the file is damaged")
        ranks[token] = int(parts[1])
    if len(set(ranks.values())) != len(ranks) or max(ranks.values(), default=0) > _LARGEST_ID:
        raise ConfigError(f"{what} gives one rank to several tokens, or one above {_LARGEST_ID}: the file is damaged")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ConfigError(
            f"{what} has no token for {len(missing)} of the 256 bytes (the first: {missing[0]}): it is cut off, or no "
            "byte-level vocabulary; expected a whole one"
        )
    return ranks


def find_encoding(ranks: dict[bytes, int], what: str, named: str | None = None) -> tuple[Encoding, dict[str, int]]:
    """The encoding of a vocabulary, and its special tokens: recognised by content, or as the user names it."""
    if named is not None and named not in ENCODINGS:
        raise ConfigError(f"encoding={named!r} is unknown: expected one of {', '.join(sorted(ENCODINGS))}")
    known = KNOWN.get(_digest(ranks))
    if known is None and named is None:
        raise ConfigError(
            f"{what} is a tiktoken file that nobody here knows, and it does not say how it cuts text into words: name "
            f"the encoding it was made for, as in {what}?encoding=cl100k_base (one of {', '.join(sorted(ENCODINGS))}), "
            "or give a tokenizer.json"
        )
    if known is not None and (named is None or ENCODINGS[named] is ENCODINGS[known]):
        return ENCODINGS[known], dict(ENCODINGS[known].special_tokens)
    if known is not None:
        raise ConfigError(f"{what} is the vocabulary of {known}, not of {named}: leave encoding={named} away")
    assert named is not None
    # Another vocabulary of this pattern: only where its text ends is added, behind all that it has.
    encoding = ENCODINGS[named]
    return encoding, {encoding.end_of_text: ranks.get(encoding.end_of_text.encode(), max(ranks.values()) + 1)}


def convert_tiktoken(data: bytes, what: str, named: str | None = None) -> tuple[str, str]:
    """A tiktoken file's content as a `tokenizer.json`, and the token that ends a text.

    Args:
        data: Lines of a token in base64 and its rank, which is its id.
        what: The file, for errors.
        named: The encoding it was made for, where its content is not a known one.
    """
    ranks = parse_ranks(data, what)
    encoding, special_tokens = find_encoding(ranks, what, named)
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges, unmade = find_merges(ranks)
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(token, token_id) for token, token_id in special_tokens.items()],
        "normalizer": {"type": encoding.normalizer} if encoding.normalizer else None,
        "pre_tokenizer": _pre_tokenizer(encoding.pattern),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": unmade > 0,
            # Special tokens too: an added one that is not here is given the next free id, whatever its own.
            "vocab": dict(
                sorted([*((spelled[token], ranks[token]) for token in ranks), *special_tokens.items()], key=_id)
            ),
            "merges": [[spelled[left], spelled[right]] for left, right in merges],
        },
    }
    return json.dumps(definition, ensure_ascii=False), encoding.end_of_text


def find_merges(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], int]:
    """The merge behind each token, by rank; and how many tokens have none."""
    merges = []
    unmade = 0
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        parts = _last_two_parts(token, ranks)
        if parts is None:
            unmade += 1
        else:
            merges.append(parts)
    return merges, unmade


def _last_two_parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """What is joined last when a token is encoded alone; None where it does not become one."""
    parts = [token[place : place + 1] for place in range(len(token))]
    none = _LARGEST_ID + 1
    get = ranks.get
    found = [get(token[place : place + 2], none) for place in range(len(token) - 1)]
    while len(parts) > 2:
        least = min(found)
        if least == none:
            return None
        at = found.index(least)  # the leftmost of equals, as both libraries do
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del found[at]
        if at < len(found):
            found[at] = get(parts[at] + parts[at + 1], none)
        if at:
            found[at - 1] = get(parts[at - 1] + parts[at], none)
    return parts[0], parts[1]


def _digest(ranks: dict[bytes, int]) -> str:
    """The SHA-256 of the file as it would be published: by rank, a line a token."""
    digest = hashlib.sha256()
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        digest.update(base64.b64encode(token) + b" %d\n" % rank)
    return digest.hexdigest()


def _decoded(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in seen}
    unseen = [byte for byte in range(256) if byte not in letters]
    return [letters[byte] if byte in letters else chr(256 + unseen.index(byte)) for byte in range(256)]


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    by_itself = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern == GPT2}
    if pattern == GPT2:
        return by_itself
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, by_itself]}


def _id(entry: tuple[str, int]) -> int:
    return entry[1]


def _special(token: str, token_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **flags, "special": True}

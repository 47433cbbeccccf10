"""Engines: what turns text into ids. `tokenizers` is the reference; gigatoken is some fifty times faster, and is used
where it gives the very same ids."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import orjson
import tokenizers

from penstock.errors import ConfigError, MissingExtraError
from penstock.feed.prefetch import Soon

_log = logging.getLogger(__name__)

EngineName = Literal["tokenizers", "gigatoken"]
IdType = np.dtype | type[np.unsignedinteger]

_HARD_TEXTS = (
    "",
    " ",
    "\n\n\n   \t\t x",
    "a\r\nb\r\n",
    "<|endoftext|>x</s> <s>[CLS]<|im_end|><unk>",
    "don't they'll I'VE 12345678 3.14159 1,000,000",
    "e\u0301 \u00e9 \ufb01 \u1e9e \u0130 \u212b",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2603\ufe0f",
    "\u4f60\u597d\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0645\u0631\u062d\u0628\u0627",
    "\x00\x01\x7f\u200b\u00ad\ufeff\u2028 \u00a0\u3000x",
    "x" * 300,
    "    def f(self):\n\t\treturn {'a': [1, 2]}  # \u2192 \u221e\n",
)
"""Where engines differ, if they do."""
_FIRST_BYTES = 100_000_000
"""How much text gigatoken encodes to rows: no more than what costs as much as importing awkward."""
_TEXT_BYTES = 256
"""What a text costs beside its bytes, in bytes."""
_MATRIX_BYTES = 1 << 19
"""Text of a matrix, for each core: more takes memory that is new each time, less leaves cores idle."""
_LONG = 128
"""Tokens a text, on average, from which on texts are copied one by one."""
_NO_IDS = np.empty(0, dtype=np.uint32)
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


class Engine(Protocol):
    """Text to ids, with no special tokens added and none recognised: in a text, ``</s>`` is letters."""

    @property
    def name(self) -> EngineName: ...

    @property
    def version(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest id it may give, so that every id fits; ids may have gaps."""
        ...

    def encode(
        self, texts: Sequence[str], *, end: int | None = None, dtype: IdType = np.uint32
    ) -> tuple[np.ndarray, np.ndarray]:
        """All ids end to end, with `end` behind each text's, and where each text's begin (one more than texts)."""
        ...


class ReferenceEngine:
    """The `tokenizers` library."""

    name: EngineName = "tokenizers"
    version = tokenizers.__version__

    def __init__(self, definition: str) -> None:
        try:
            self.inner = tokenizers.Tokenizer.from_str(definition)
        except BaseException as error:  # the engine raises nothing narrower, and its panics are no Exception at all
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ConfigError(
                f"not a tokenizer.json: {error}: expected a file written by the tokenizers library"
            ) from error
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()

    @property
    def vocab_size(self) -> int:
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(
        self, texts: Sequence[str], *, end: int | None = None, dtype: IdType = np.uint32
    ) -> tuple[np.ndarray, np.ndarray]:
        try:
            encodings = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the engine raises nothing narrower
            raise ConfigError(f"the tokenizer cannot encode a text: {error}: name a tokenizer that can") from error
        ids = [encoding.ids for encoding in encodings]
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum([len(document) for document in ids], out=offsets[1:])
        flat = np.empty(offsets[-1], dtype=np.uint32)
        for document, start in zip(ids, offsets[:-1].tolist(), strict=True):
            flat[start : start + len(document)] = document
        return _closed(flat, offsets, end, dtype)


class GigatokenEngine:
    """The gigatoken library. Encodes on all cores, and on the calling thread alone in a forked or spawned worker.

    What it gives for a batch comes as an array of `awkward`, which takes a quarter of a second to import; as rows of a
    matrix it costs more for each text, and nothing at first. So the first texts come as rows.
    """

    name: EngineName = "gigatoken"

    def __init__(self, definition: str) -> None:
        try:
            import gigatoken
        except ImportError as error:
            raise MissingExtraError(
                f"the tokenizer engine gigatoken is not there ({error}): pip install 'gigatoken>=0.10'"
            ) from error
        from importlib.metadata import version

        self.version = version("gigatoken")
        # It would recognise special tokens in texts; added tokens of another kind are words, and recognised by both.
        self._inner: Any = gigatoken.Tokenizer.from_json(_without_special_tokens(definition))
        self._left_bytes = _FIRST_BYTES
        """How much more comes as rows, about: threads do not agree on it."""

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    def encode(
        self, texts: Sequence[str], *, end: int | None = None, dtype: IdType = np.uint32
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._left_bytes > 0:
            return self._encode_first(texts, [] if end is None else [end], dtype)
        layout = self._inner.encode_batch(list(texts)).layout
        return _closed(np.asarray(layout.content.data), np.asarray(layout.offsets.data), end, dtype)

    def _encode_first(self, texts: Sequence[str], suffix: list[int], dtype: IdType) -> tuple[np.ndarray, np.ndarray]:
        """A matrix is for texts of about one length, so that little of it is padding."""
        from gigatoken import BytesSource

        encoded = [text.encode() for text in texts]
        costs = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) + _TEXT_BYTES
        order = np.argsort(costs, kind="stable")
        costs = costs[order]
        totals = np.cumsum(costs)
        self._left_bytes -= int(costs.sum())
        most = _MATRIX_BYTES * len(os.sched_getaffinity(0))
        pieces = [_NO_IDS] * len(encoded)
        first = 0
        while first < len(order):
            stop = int(np.searchsorted(costs[: np.searchsorted(totals, totals[first] + most)], 1.5 * costs[first]))
            places = order[first:stop].tolist()
            source = BytesSource([encoded[place] for place in places])
            rows, lengths = self._inner.encode_batch_padded(source, 0, suffix=suffix)
            for place, row, length in zip(places, rows, lengths.tolist(), strict=True):
                pieces[place] = row[:length].astype(dtype)
            first = stop
        offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        return np.concatenate([_NO_IDS, *pieces], dtype=dtype), offsets


def _closed(ids: np.ndarray, offsets: np.ndarray, end: int | None, dtype: IdType) -> tuple[np.ndarray, np.ndarray]:
    """Ids with `end` behind each text's."""
    if end is None:
        return ids.astype(dtype, copy=False), offsets
    texts = len(offsets) - 1
    ends = offsets[1:] + np.arange(texts)
    closed = np.empty(len(ids) + texts, dtype=dtype)
    if len(ids) >= _LONG * texts:
        starts, last = 0, 0
        for stop, text_stop in zip(ends.tolist(), offsets[1:].tolist(), strict=True):
            closed[starts:stop] = ids[last:text_stop]
            starts, last = stop + 1, text_stop
    else:
        is_text = np.ones(len(closed), dtype=bool)
        is_text[ends] = False
        closed[is_text] = ids
    closed[ends] = end
    return closed, np.concatenate([[0], ends + 1])


def _without_special_tokens(definition: str) -> str:
    """A `tokenizer.json` less its special tokens. Only they are read where they stand out: the rest is megabytes."""
    found = _ADDED_TOKENS.search(definition)
    if found is not None and definition.count('"added_tokens"') == 1:
        tokens, stop = json.JSONDecoder().raw_decode(definition, found.end())
        return definition[: found.end()] + orjson.dumps(_words(tokens)).decode() + definition[stop:]
    fields = orjson.loads(definition)
    fields["added_tokens"] = _words(fields.get("added_tokens") or [])
    return orjson.dumps(fields).decode()


def _words(added_tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [token for token in added_tokens if not token.get("special")]


def make_engine(name: EngineName, definition: str) -> Engine:
    """The engine of this name for a `tokenizer.json`."""
    if name == "tokenizers":
        return ReferenceEngine(definition)
    if name == "gigatoken":
        return GigatokenEngine(definition)
    raise ConfigError(f"engine={name!r} is unknown: expected 'tokenizers' or 'gigatoken'")


def choose_engine(definition: str, samples: Sequence[str]) -> EngineName:
    """The fastest engine that gives the reference's ids on hard texts and on some of the user's own."""
    return fitting_engines(definition, samples)[1].name


def fitting_engines(definition: str, samples: Sequence[str]) -> tuple[ReferenceEngine, Engine]:
    """The reference, and the fastest engine that gives its ids on hard texts and on some of the user's own."""
    reference = ReferenceEngine(definition)
    texts = [*_HARD_TEXTS, *samples]
    expected = Soon(lambda: reference.encode(texts))  # which leaves the interpreter to the loading of the other
    try:
        return reference, _fast_engine(definition, texts, expected) or reference
    finally:
        expected.wait()


def _fast_engine(
    definition: str, texts: Sequence[str], expecting: Soon[tuple[np.ndarray, np.ndarray]]
) -> GigatokenEngine | None:
    """gigatoken, if it gives the ids that are expected; else says why not."""
    try:
        fast = GigatokenEngine(definition)
    except MissingExtraError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever it raises: a tokenizer it does not know is for the reference
        _log.warning("gigatoken does not know this tokenizer (%s): tokenising with tokenizers, which is slower", error)
        return None
    try:
        got, expected = fast.encode(texts), expecting.result()
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("gigatoken failed (%s): tokenising with tokenizers, which is slower", error)
        return None
    if all(np.array_equal(one, other) for one, other in zip(got, expected, strict=True)):
        return fast
    differs = next(
        text
        for text, first, last, second, end in zip(
            texts, got[1][:-1], got[1][1:], expected[1][:-1], expected[1][1:], strict=True
        )
        if not np.array_equal(got[0][first:last], expected[0][second:end])
    )
    _log.warning("gigatoken gives other ids than tokenizers for %r: using the latter, which is slower", differs[:80])
    return None

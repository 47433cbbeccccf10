"""Whatever a user hands in as a tokenizer, as one that pages are tokenised with."""

from __future__ import annotations

import hashlib
import inspect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, SupportsIndex

import numpy as np

from penstock.blocks import cache_folder
from penstock.errors import ConfigError, StorageError
from penstock.feed.engines import Engine, EngineName, ReferenceEngine, fitting_engines
from penstock.feed.loading import find_tokenizer, make_tokenizer
from penstock.feed.tokenizer import Encoded, Tokenizer
from penstock.feed.tokenizer_files import NamedTokenizer
from penstock.feed.tokenizer_name import FORMS
from penstock.storage import LocalStorage

_ENGINES: tuple[EngineName, ...] = ("gigatoken", "tokenizers")
_LARGEST_VOCABULARY = 1 << 31
_KEPT = 4
_lock = threading.Lock()
_made: OrderedDict[tuple[str, str, bytes], Tokenizer] = OrderedDict()


def _renew() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class PageTokenizerLike(Protocol):
    """What pages ask of a tokenizer."""

    vocab_size: Any
    """One more than the highest id."""

    @property
    def end_of_text_id(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> Encoded: ...


class ForeignTokenizer:
    """An object that encodes texts by some way of its own. Pickles where the object does.

    Nothing is known of what it is made of, so its tokens are not kept: `fingerprint` is empty.
    """

    fingerprint = ""

    def __init__(self, inner: Any) -> None:
        end = getattr(inner, "eos_token_id", None)
        end = getattr(inner, "eot_token", None) if end is None else end
        end = end.__index__() if isinstance(end, SupportsIndex) and not isinstance(end, bool) else -1
        if not 0 <= end < _LARGEST_VOCABULARY:
            raise ConfigError(
                f"the tokenizer ({type(inner).__name__}) has no eos_token_id, or one that is no id, so nothing "
                f"would end a document: give it one, or name a tokenizer: {FORMS}"
            )
        self.end_of_text_id = end
        size = getattr(inner, "n_vocab", None) or (len(inner) if hasattr(inner, "__len__") else None)
        size = size or getattr(inner, "vocab_size", None) or _LARGEST_VOCABULARY
        self.vocab_size = max(int(size), end + 1)
        self._inner = inner

    def __reduce__(self) -> tuple[object, ...]:
        return ForeignTokenizer, (self._inner,)

    def encode(self, texts: Sequence[str]) -> Encoded:
        documents = [self._checked(ids) for ids in self._encoded(texts)]
        offsets = np.cumsum([0, *(len(ids) + 1 for ids in documents)])
        closing = np.array([self.end_of_text_id], dtype=np.uint32)
        return Encoded(np.concatenate([part for ids in documents for part in (ids, closing)]), offsets)

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        found = np.asarray(ids)
        if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise ConfigError(
                f"the tokenizer ({type(self._inner).__name__}) makes {found.dtype} of shape {found.shape} of a text: "
                "expected a list of whole numbers"
            )
        if len(found) and not 0 <= found.min() <= found.max() < _LARGEST_VOCABULARY:
            raise ConfigError(
                f"the tokenizer ({type(self._inner).__name__}) gave ids from {found.min()} to {found.max()}: expected "
                f"0 to {_LARGEST_VOCABULARY - 1}"
            )
        return found.astype(np.uint32)

    def _encoded(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        inner: Any = self._inner
        if hasattr(inner, "encode_ordinary_batch"):
            return inner.encode_ordinary_batch(list(texts))
        if callable(inner) and (hasattr(inner, "convert_tokens_to_ids") or not hasattr(inner, "encode")):
            made: Any = inner(list(texts), add_special_tokens=False)  # of the transformers kind
            return made["input_ids"]
        encode: Any = getattr(inner, "encode")  # noqa: B009
        more = {"add_special_tokens": False} if _takes(encode, "add_special_tokens") else {}
        return [encode(text, **more) for text in texts]


def as_tokenizer(given: Any, first_texts: Callable[[], list[str]], dataset_id: str) -> PageTokenizerLike:
    """A tokenizer, with the fastest engine that gives the reference's ids, also on some of the data set's texts.

    Args:
        given: A name as `DistributedLoader` takes it, a `Tokenizer`, one of the tokenizers library, one of the
            transformers kind, or anything with ``encode`` and an ``eos_token_id``.
        first_texts: Some of the data set's texts, always the same, to compare engines by.
        dataset_id: The data set they are from.
    """
    if isinstance(given, str | os.PathLike):
        return _on_engine(find_tokenizer(os.fspath(given)), first_texts, dataset_id)
    if hasattr(given, "encode_plain") and hasattr(given, "end_of_text_id"):
        return given
    definition, end = _definition(given)
    if definition is not None:
        origin = f"a {type(given).__name__}"
        named = NamedTokenizer(definition=definition, end_of_text=end, chat_templates={}, origin=origin, told_by=origin)
        return _on_engine(named, first_texts, dataset_id)
    if given is None or not (callable(given) or hasattr(given, "encode")):
        raise ConfigError(f"tokenizer={given!r} encodes nothing: expected {FORMS}, or a tokenizer object")
    return ForeignTokenizer(given)


def _definition(given: Any) -> tuple[str | None, str | None]:
    """What `tokenizer.json` would hold, and what ends a document; None where an object is not made of such."""
    backend = getattr(given, "backend_tokenizer", given)
    if not hasattr(backend, "to_str") or not hasattr(backend, "encode_batch"):
        return None, None
    return backend.to_str(), getattr(given, "eos_token", None)


def _on_engine(named: NamedTokenizer, first_texts: Callable[[], list[str]], dataset_id: str) -> Tokenizer:
    """On the engine that suits it. Which one that is was noted, where the same was asked before: an engine is chosen
    once for a tokenizer and a data set."""
    notes = LocalStorage(cache_folder().expanduser().absolute() / "pages" / "engines")
    installed = [f"{engine} {_version(engine)}" for engine in _ENGINES]
    name = hashlib.sha256("\n".join([dataset_id, *installed, named.definition]).encode()).hexdigest()[:40]
    try:
        noted = notes.get(name).decode()
    except (StorageError, UnicodeDecodeError):  # mostly: not there
        noted = ""
    for engine in _ENGINES:
        if engine == noted:
            return _once(named, engine)
    try:
        fitting = fitting_engines(named.definition, first_texts())
    except ConfigError as error:
        raise ConfigError(f"{named.origin}: {error}") from error
    made = _once(named, fitting)
    try:
        notes.put(name, made.engine.encode())
    except StorageError:
        return made  # where nothing can be written, engines are compared each time
    return made


def _once(named: NamedTokenizer, engine: EngineName | tuple[ReferenceEngine, Engine]) -> Tokenizer:
    """A tokenizer that was made before is taken again: windows are many, and loading one takes a while."""
    name = engine if isinstance(engine, str) else engine[1].name
    key = name, named.end_of_text or "", hashlib.sha256(named.definition.encode()).digest()
    with _lock:
        found = _made.pop(key, None) or make_tokenizer(named, engine)
        _made[key] = found
        while len(_made) > _KEPT:
            _made.popitem(last=False)
        return found


def _takes(function: Any, option: str) -> bool:
    """Whether a function has a parameter of that name, or takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # one that is not Python's and does not say
        return False
    return option in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"

"""What is known of a tokenizer beforehand, so that a feed from a full token cache starts without loading it.

Beside a data set's token caches lies a note for each tokenizer used there, under a key made of its files' contents, the
data set and the engine that is installed: which engine was chosen, and the few facts that a feed from tokens asks for.
Whatever else is asked of it loads the tokenizer itself, which must then be the one that the note tells of.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from penstock.blocks import BlockManager, cache_folder
from penstock.errors import ConfigError, StorageError
from penstock.storage import LocalStorage

if TYPE_CHECKING:
    from penstock.feed.engines import EngineName
    from penstock.feed.tokenizer import Encoded, Tokenizer

_log = logging.getLogger(__name__)

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_ENGINES = ("gigatoken", "tokenizers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What a feed from tokens asks of a tokenizer."""

    fingerprint: str
    engine: EngineName
    vocab_size: int
    end_of_text: str
    end_of_text_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerFacts:
        return cls(
            fingerprint=tokenizer.fingerprint,
            engine=tokenizer.engine,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text_id,
        )


class KnownTokenizer:
    """A tokenizer by its facts; loaded when more is asked of it. Has a `Tokenizer`'s face, and pickles."""

    def __init__(self, spec: str, blocks: BlockManager, facts: TokenizerFacts) -> None:
        self._spec = spec
        self._blocks = blocks
        self._facts = facts
        self._loaded: Tokenizer | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return KnownTokenizer, (self._spec, self._blocks, self._facts)

    @property
    def fingerprint(self) -> str:
        return self._facts.fingerprint

    @property
    def engine(self) -> EngineName:
        return self._facts.engine

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    @property
    def end_of_text(self) -> str:
        return self._facts.end_of_text

    @property
    def end_of_text_id(self) -> int:
        return self._facts.end_of_text_id

    @property
    def definition(self) -> str:
        return self._tokenizer.definition

    @property
    def chat_templates(self) -> dict[str, str]:
        return self._tokenizer.chat_templates

    def encode(self, texts: Sequence[str], dtype: np.dtype | type[np.unsignedinteger] = np.uint32) -> Encoded:
        return self._tokenizer.encode(texts, dtype)

    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._tokenizer.encode_plain(texts)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._loaded is None:
            from penstock.feed.loading import find_tokenizer, make_tokenizer

            # With the engine that was chosen before: it is never switched inside a token cache.
            loaded = make_tokenizer(find_tokenizer(self._spec), self._facts.engine)
            if loaded.fingerprint != self._facts.fingerprint:
                raise ConfigError(
                    f"tokenizer {self._spec!r} is not the one that the token cache was begun with: got "
                    f"{loaded.fingerprint}, expected {self._facts.fingerprint}: load it anew in another process"
                )
            self._loaded = loaded
        return self._loaded


def know_tokenizer(spec: str, blocks: BlockManager) -> Tokenizer | KnownTokenizer:
    """A tokenizer that was used for this data set before, by its facts; else loaded, and noted for the next time."""
    key = _key(spec, blocks)
    if key is None:
        return _load(spec, blocks)
    notes, name = key
    try:
        found = orjson.loads(notes.get(name)) if notes.exists(name) else None
        if found is not None:
            return KnownTokenizer(spec, blocks, TokenizerFacts(**found))
    except (StorageError, orjson.JSONDecodeError, TypeError) as error:
        _log.warning("%s/%s: a note of a tokenizer cannot be read, so it is loaded anew: %s", notes.url, name, error)
    loaded = _load(spec, blocks)
    try:
        notes.put(name, orjson.dumps(asdict(TokenizerFacts.of(loaded))))
    except StorageError as error:
        _log.debug("a tokenizer is not noted: %s", error)  # where nothing can be written, it is loaded each time
    return loaded


def _load(spec: str, blocks: BlockManager) -> Tokenizer:
    from penstock.feed.loading import load_tokenizer

    return load_tokenizer(spec, blocks)


def _key(spec: str, blocks: BlockManager) -> tuple[LocalStorage, str] | None:
    """Where the note of a tokenizer is; None for one that is not in files here."""
    path = Path(spec).expanduser()
    beside = blocks.store_path or cache_folder()  # of a data set that is not on these disks
    if not path.exists():
        return None
    folder, own = (path, []) if path.is_dir() else (path.parent, [path.name])
    told = hashlib.blake2b(f"1\n{spec}\n{blocks.manifest.fingerprint}\n".encode(), digest_size=16)
    names = own if own and own[0] != _FILES[0] else [*_FILES, *sorted(p.name for p in folder.glob("*.tiktoken"))]
    for name in names:
        if (file := folder / name).is_file():
            told.update(f"{name} {file.stat().st_size}\n".encode())
            told.update(file.read_bytes())
    for engine in _ENGINES:
        found: Any = find_spec(engine)
        stat = Path(found.origin).stat() if found is not None and found.origin else None
        told.update(f"{engine} {stat.st_mtime_ns if stat else 0} {stat.st_ino if stat else 0}\n".encode())
    return LocalStorage(beside / "tokens" / "tokenizers"), f"{told.hexdigest()}.json"

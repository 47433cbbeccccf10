"""The files that make a tokenizer, wherever they are: which one defines it, and which say where its texts end.

tokenizer.json, or one *.tiktoken                       the definition
tokenizer_config.json: eos_token                        what ends a document
  or special_tokens_map.json: eos_token
  or generation_config.json: eos_token_id, where it is one
chat_template.jinja, or tokenizer_config.json: chat_template     kept with it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from penstock.errors import ConfigError
from penstock.feed.engines import ReferenceEngine
from penstock.feed.tiktoken_file import convert_tiktoken, looks_like_tiktoken

DEFINITION = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_SENTENCEPIECE = "tokenizer.model"


class TokenizerFiles(Protocol):
    """A folder's files, here or on the Hub. Reading a file that is not among `names` is a `ConfigError`."""

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """A local folder's files; or one file of it alone."""

    folder: Path
    only: str | None = None
    """The one file that counts: a definition under a name of its own says nothing about its neighbours."""

    @property
    def where(self) -> str:
        return str(self.folder)

    @property
    def names(self) -> frozenset[str]:
        if self.only is not None:
            return frozenset({self.only})
        return frozenset(path.name for path in self.folder.iterdir() if path.is_file())

    def read(self, name: str) -> bytes:
        path = self.folder / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"tokenizer {str(path)!r} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTokenizer:
    """What a tokenizer's name stands for."""

    definition: str
    """The content of a `tokenizer.json`."""
    end_of_text: str | None = None
    """The token that ends a document; None where nothing says, and it is to be found among the usual ones."""
    told_by: str = ""
    """Who names it."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """How a chat becomes text, by name; ``default`` is the usual one."""
    origin: str = ""
    """Where it came from: a path, or a commit of a repository."""


def read_tokenizer(
    files: TokenizerFiles, main: str, *, encoding: str | None = None, end_of_text: str | None = None
) -> NamedTokenizer:
    """Read a tokenizer: its definition last, so that a copy which has that has everything.

    Args:
        files: Where to read.
        main: The file that defines it; see `find_definition`.
        encoding: For a tiktoken file that is not a known one.
        end_of_text: The token that ends a document; wins over what the files say.
    """
    config = _json(files, CONFIG)
    told, told_by = end_of_text, "end_of_text"
    if told is None:
        told, told_by = next(_told_ends(files, config), (None, ""))
    generation = _json(files, GENERATION) if told is None else {}
    chat_templates = _chat_templates(files, config)
    data = files.read(main)
    if main.endswith(".tiktoken") or looks_like_tiktoken(data):
        definition, usual_end = convert_tiktoken(data, f"{files.where}/{main}", encoding)
        told, told_by = (told, told_by) if told is not None else (usual_end, "its encoding")
    else:
        if encoding is not None:
            raise ConfigError(f"{files.where}/{main} is no tiktoken file: leave encoding={encoding} away")
        definition = _text(data, f"{files.where}/{main}")
    only = generation.get("eos_token_id")
    only = only[0] if isinstance(only, list) and len(only) == 1 else only
    if told is None and isinstance(only, int):
        told, told_by = ReferenceEngine(definition).inner.id_to_token(only), GENERATION
    return NamedTokenizer(
        definition=definition,
        end_of_text=told,
        told_by=told_by if told is not None else "",
        chat_templates=chat_templates,
        origin=f"{files.where}/{main}",
    )


def find_definition(files: TokenizerFiles) -> str:
    """The file that defines the tokenizer; refused with what is there instead."""
    names = files.names
    if DEFINITION in names:
        return DEFINITION
    ranks = sorted(name for name in names if name.endswith(".tiktoken"))
    if len(ranks) == 1:
        return ranks[0]
    if len(ranks) > 1:
        raise ConfigError(
            f"{files.where} has no {DEFINITION} and several tiktoken files ({', '.join(ranks)}): name one"
        )
    if _SENTENCEPIECE in names and looks_like_tiktoken(files.read(_SENTENCEPIECE)):
        return _SENTENCEPIECE  # Llama's name for a tiktoken file
    slow = [name for name in (_SENTENCEPIECE, "spiece.model", "vocab.json", "merges.txt", "vocab.txt") if name in names]
    has = f"only {' and '.join(slow)}, of a slow tokenizer" if slow else "nothing that is one"
    raise ConfigError(
        f"{files.where} has no {DEFINITION}: {has}. Name a model that has one, or make one with transformers: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and name the folder"
    )


def _told_ends(files: TokenizerFiles, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Tokens that the files name as the end, the weightiest first."""
    if token := _token(config.get("eos_token")):
        yield token, CONFIG
    if token := _token(_json(files, SPECIAL_TOKENS).get("eos_token")):
        yield token, SPECIAL_TOKENS


def _token(value: object) -> str | None:
    """A token as these files write it: its text, or an object with its text as content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _chat_templates(files: TokenizerFiles, config: dict[str, Any]) -> dict[str, str]:
    told = config.get("chat_template")
    found = {"default": told} if isinstance(told, str) else {}
    for entry in told if isinstance(told, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            found[entry["name"]] = entry["template"]
    if CHAT_TEMPLATE in files.names:
        found["default"] = _text(files.read(CHAT_TEMPLATE), f"{files.where}/{CHAT_TEMPLATE}")
    return found


def _json(files: TokenizerFiles, name: str) -> dict[str, Any]:
    """A file's object; nothing where there is no such file."""
    if name not in files.names:
        return {}
    try:
        found = orjson.loads(files.read(name))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{files.where}/{name} is not JSON: {error}: mend or remove it") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{files.where}/{name} is a JSON {type(found).__name__}, expected an object: mend or remove it"
        )
    return found


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not UTF-8: expected text") from error

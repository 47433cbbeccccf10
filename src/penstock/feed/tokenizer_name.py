"""What a user may call a tokenizer by, taken apart: a path or a repository of the Hub, and options behind it.

    PATH | OWNER/NAME[@REVISION] | hf://OWNER/NAME[@REVISION]     and behind any of them  ?encoding=...&end_of_text=...

A file or folder that is there is meant, before anything else. Otherwise a name that can be a repository's is one,
unless it is spelled like a path: it begins with ``/``, ``.`` or ``~``, has more than one slash, or ends like a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

FORMS = "tokenizer.json, a folder with one, a *.tiktoken file, or a model of the Hub (owner/name[@revision])"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_FILE_ENDINGS = (".json", ".tiktoken", ".model", ".bpe", ".txt", ".gguf", ".bin", ".jinja")
_OPTIONS = ("encoding", "end_of_text")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hub, and perhaps a branch, a tag or a commit of it."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerName:
    """A tokenizer's name, taken apart."""

    place: Path | HubName
    encoding: str | None = None
    """For a tiktoken file: what it was made for, where its content does not tell."""
    end_of_text: str | None = None
    """The token that ends a document, where it is not to be the tokenizer's own."""


def parse_tokenizer_name(text: str) -> TokenizerName:
    """Take a name apart, and decide whether a path is meant or the Hub. Looks whether there is such a path."""
    if not text:
        raise ConfigError(f"the tokenizer's name is empty: expected {FORMS}")
    if _is_there(text):
        return TokenizerName(place=Path(text).expanduser())
    name, _, query = text.partition("?")
    options = _options(query, text)
    if name.startswith("hf://"):
        hub_name = _hub_name(name.removeprefix("hf://"))
        if hub_name is None:
            raise ConfigError(f"tokenizer {text!r} names no repository: expected hf://owner/name[@revision]")
        return TokenizerName(place=hub_name, **options)
    if "://" in name:
        raise ConfigError(f"tokenizer {text!r} is neither a path nor a model of the Hub: expected {FORMS}")
    hub_name = None if _is_there(name) or is_spelled_like_a_path(name) else _hub_name(name)
    return TokenizerName(place=hub_name or Path(name).expanduser(), **options)


def is_spelled_like_a_path(name: str) -> bool:
    """Whether a name that is no file here was meant as one all the same."""
    bare = name.partition("@")[0]
    return name.startswith(("/", ".", "~")) or bare.count("/") > 1 or "\\" in name or bare.endswith(_FILE_ENDINGS)


def _is_there(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a zero byte: no path in any case
        return False


def _hub_name(text: str) -> HubName | None:
    name, at, revision = text.partition("@")
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name or (at and not revision.strip()):
        return None
    return HubName(name, revision or None)


def _options(query: str, text: str) -> dict[str, str]:
    """What stands behind the question mark, as it is: a token may hold any sign but ``&``."""
    found: dict[str, str] = {}
    for entry in query.split("&") if query else ():
        option, _, value = entry.partition("=")
        if option not in _OPTIONS or not value or option in found:
            raise ConfigError(
                f"tokenizer {text!r}: {entry!r} is not understood: expected {' or '.join(f'{o}=...' for o in _OPTIONS)}"
            )
        found[option] = value
    return found

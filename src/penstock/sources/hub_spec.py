"""What the user wrote behind ``hf://``, taken apart.

hf://name                       a data set of the Hub: its default config, its train split or its only one
hf://owner/name:config:split    one config and one split; ``hf://owner/name:train`` is a split where no config has
                                that name, and ``hf://name::test`` one of the default config
hf://owner/name@revision:...    at a branch, a tag or a commit
hf:///a/folder:config:split     a local folder laid out like a repository of the Hub (also ./, ../ and ~/)
hf://datasets/owner/name@revision/a/path/*.parquet        files of a repository, by name or pattern
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from penstock.errors import SourceError

SCHEME = "hf://"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILES = re.compile(
    r"datasets/(?P<name>[\w.-]+/[\w.-]+|[\w.-]+(?=@))"  # a bare name only with a revision: else it is an owner
    r"(@(?P<revision>refs/[^/]+/[^/]+|(?!refs/)[^/]+))?/(?P<path>.+)"
)
_EXPECTED = "expected hf://name[:config[:split]], such as hf://wikitext:wikitext-2-raw-v1:train"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSpec:
    """One data set of the Hub, or of a folder like it."""

    text: str
    """As the user wrote it."""
    name: str
    """Repository, or path of a local folder."""
    revision: str | None = None
    first: str | None = None
    """What stands behind the first colon: a config, or a split."""
    split: str | None = None
    pattern: str | None = None
    """Files named directly."""

    @property
    def folder(self) -> Path | None:
        """The local folder it names, where it names one."""
        return Path(self.name).expanduser() if _is_local(self.name) else None

    @property
    def stem(self) -> str:
        folder = self.folder
        return (folder.resolve().name if folder else self.name.rpartition("/")[2]) or "dataset"


def parse_hub_spec(text: str) -> HubSpec:
    """Take a spec apart, or say how it should look. Does no I/O."""
    rest = text.removeprefix(SCHEME)
    if by_file := _FILES.fullmatch(rest):
        revision = by_file["revision"]
        return HubSpec(
            text=text,
            name=by_file["name"],
            revision=unquote(revision) if revision else None,
            pattern=by_file["path"],
        )
    head, *parts = rest.split(":")
    is_local = _is_local(head)
    if any(bracket in part for bracket in "[]" for part in (parts if is_local else [rest])):
        raise SourceError(
            f"{text}: slices are not supported: ingest the whole split, such as {text.partition('[')[0]}; "
            "training can stop earlier with --steps"
        )
    if len(parts) > 2:
        raise SourceError(f"{text}: {len(parts)} parts behind the name: {_EXPECTED}")
    if any("+" in part for part in parts):
        raise SourceError(f"{text}: several splits at once are not supported: ingest one after the other")
    name, _, revision = (head, "", "") if is_local else head.removeprefix("datasets/").partition("@")
    spec = HubSpec(
        text=text,
        name=name,
        revision=unquote(revision) or None,
        first=parts[0] or None if parts else None,
        split=parts[1] or None if len(parts) > 1 else None,
    )
    if not is_local and not _NAME.fullmatch(name):
        raise SourceError(f"{text}: {name!r} is no name of a data set: {_EXPECTED}")
    return spec


def _is_local(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~/")) or name in (".", "..")

"""Patterns over keys: ** crosses folders, * does not."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts of a key are what the parts of a pattern say."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(matches(parts[skip:], wanted[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and matches(parts[1:], wanted[1:])

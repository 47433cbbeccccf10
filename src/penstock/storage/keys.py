"""What can be a key, on every backend alike."""

from __future__ import annotations

from penstock.errors import ConfigError

TEMP_SUFFIX = ".penstock-tmp"
LOCK_SUFFIX = ".penstock-lock"
RESERVED = (TEMP_SUFFIX, LOCK_SUFFIX)
"""Ends of names that a store uses for itself: they are no keys, and no list shows them."""


def check_key(key: str) -> None:
    """Refuse what is no key: it must be a relative path that leads nowhere else."""
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise ConfigError(f"storage key {key!r} is not valid: expected a relative path without '..' or empty parts")
    if key.endswith(RESERVED):
        raise ConfigError(f"storage key {key!r} is not valid: names ending in {' or '.join(RESERVED)} are reserved")


def check_prefix(prefix: str) -> str:
    """Refuse what is no beginning of a key; return the folder in which all keys with this prefix are."""
    inside = prefix.rpartition("/")[0]
    if "\0" in prefix or prefix.startswith("/"):
        raise ConfigError(f"storage prefix {prefix!r} is not valid: expected the beginning of a key")
    if inside:
        check_key(inside)
    return inside


def check_range(what: str, start: int, stop: int) -> None:
    """Refuse bytes that are no range."""
    if not 0 <= start <= stop:
        raise ConfigError(f"bytes {start} to {stop} of {what} are no range: expected 0 <= start <= stop")


def check_offset(what: str, start: int) -> None:
    """Refuse an offset before the beginning."""
    if start < 0:
        raise ConfigError(f"offset {start} is not in {what}: expected 0 or more")

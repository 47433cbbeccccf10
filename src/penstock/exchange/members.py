"""Who may contribute: a list that the run's owner keeps. Nobody looks for miners among what miners wrote."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from penstock.errors import ConfigError, ExchangeError, ObjectNotFound, PreconditionFailed
from penstock.exchange.keys import Keys, check_name
from penstock.storage import ReadableStorage, Storage


def read_members(storage: ReadableStorage, keys: Keys) -> tuple[str, ...]:
    """The members, in the order in which they were admitted."""
    return _read(storage, keys)[0]


def begin_members(storage: Storage, keys: Keys, uids: Iterable[str]) -> None:
    """The members a run begins with; nothing happens where it has some."""
    try:
        storage.put_if_absent(keys.members, _told(uids))
    except PreconditionFailed:
        return


def admit(storage: Storage, keys: Keys, uids: Iterable[str], *, remove: bool = False) -> tuple[str, ...]:
    """Add members, or remove them, and leave the others alone whoever else is at it; returns all."""
    wanted = [check_name(uid, "uid") for uid in uids]
    while True:
        members, version = _read(storage, keys)
        if remove:
            changed = [uid for uid in members if uid not in wanted]
        else:
            changed = [*members, *(uid for uid in dict.fromkeys(wanted) if uid not in members)]
        if tuple(changed) == members:
            return members
        try:
            storage.put_if_match(keys.members, _told(changed), version)
        except PreconditionFailed:
            continue  # another was quicker: begin with what it wrote
        return tuple(changed)


def _read(storage: ReadableStorage, keys: Keys) -> tuple[tuple[str, ...], str]:
    try:
        data, info = storage.get_with_info(keys.members)
    except ObjectNotFound:
        raise ExchangeError(f"{storage.url} holds no run {keys.run!r}: start its aggregator first") from None
    try:
        told = orjson.loads(data)["members"]
        if not isinstance(told, list) or len(set(told)) != len(told):
            raise TypeError("expected a list of names, each once")
        members = tuple(check_name(uid, "uid") for uid in told)
    except (orjson.JSONDecodeError, KeyError, TypeError, ConfigError) as error:
        raise ExchangeError(f"{keys.members} is damaged: {error}") from error
    return members, info.version or ""


def _told(uids: Iterable[str]) -> bytes:
    return orjson.dumps({"members": list(uids)})

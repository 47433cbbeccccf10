"""Connecting to an object store through obstore, and what holds for every request.

obstore's sync API is used, from any thread, and nothing of it after a fork. Its own retries are off, except for the
parts of a large upload, which nobody else can send again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from penstock.errors import ConfigError, PenstockError, StorageError
from penstock.storage.address import StoreAddress
from penstock.storage.answers import translate
from penstock.storage.retry import RetryBudget
from penstock.storage.secret import Secret

READING, WRITING = "reading", "writing"

T = TypeVar("T")
_used_in: int | None = None
"""The process in which obstore's threads were started; a fork has none of them and would wait for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long one request may take."""

    connect_s: float = 10.0
    read_s: float = 30.0
    """Without a byte, while something is read."""
    whole_s: float = 900.0
    """A whole answer, however steadily it trickles."""
    write_s: float = 300.0
    """A whole write; of a large object, of each part."""


def connect(address: StoreAddress, t: Timeouts, use: RetryBudget | str) -> Any:
    """A store of obstore for a use: READING, WRITING, or the budget within which parts of large uploads are sent."""
    from obstore import store as stores

    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=t.connect_s)}
    if use == READING:
        client |= {"read_timeout": timedelta(seconds=t.read_s), "timeout": timedelta(seconds=t.whole_s)}
    else:  # the time-out for a read would count from the first byte sent
        client |= {"timeout": timedelta(seconds=t.write_s)}
    if (address.endpoint or address.bucket).startswith("http://"):
        client["allow_http"] = True
    address.check()
    more: dict[str, Any] = {"client_options": client, "retry_config": _retry_config(use)}
    kinds: dict[str, Callable[..., Any]] = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
    problem = ""
    try:
        if address.scheme == "http":
            return stores.HTTPStore.from_url(address.bucket, **more)
        if address.scheme == "s3":
            more |= _s3_settings(address)
        else:
            more["config"] = _revealed(address)
        return kinds[address.scheme](address.bucket, **more)
    except PenstockError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is may tell the values, so only its kind is passed on
        problem = type(error).__name__
    more.clear()
    names = ", ".join(sorted(address.options)) or "none"
    raise ConfigError(
        f"{address.told} cannot be opened ({problem}): check its options (given: {names}) and the environment"
    )


def _retry_config(use: RetryBudget | str) -> Any:
    if isinstance(use, str):
        return {"max_retries": 0}
    return {
        "max_retries": use.attempts - 1,
        "retry_timeout": timedelta(seconds=use.deadline_s),
        "backoff": {
            "init_backoff": timedelta(seconds=use.first_wait_s),
            "max_backoff": timedelta(seconds=use.longest_wait_s),
            "base": 2,
        },
    }


def _s3_settings(address: StoreAddress) -> dict[str, Any]:
    """Settings that no variable of the environment overrides in part: keys that were given go with their own session
    token or none, and an endpoint that was given is the one that is used."""
    config = {"disable_bulk_delete": True, **_revealed(address)}
    if "endpoint" in config:
        config.setdefault("aws_endpoint_url_s3", config["endpoint"])
    if "access_key_id" not in config:
        return {"config": config}
    credential = {
        "access_key_id": config.pop("access_key_id"),
        "secret_access_key": config.pop("secret_access_key"),
        "token": config.pop("session_token", None),
        "expires_at": None,
    }
    return {"config": config, "credential_provider": lambda: credential}


def _revealed(address: StoreAddress) -> dict[str, Any]:
    return {name: value.reveal() if isinstance(value, Secret) else value for name, value in address.options.items()}


def call(request: Callable[[], T], what: str) -> T:
    """Do one request; its failure in the contract's words, with nothing of obstore's own text behind it."""
    from obstore.exceptions import BaseError

    try:
        return request()
    except (BaseError, OSError, ValueError) as error:
        failure = translate(error, what)
    raise failure


def refuse_after_fork() -> None:
    """Note the process that uses obstore, and refuse to go on in a fork of it, where every request would hang."""
    global _used_in
    if _used_in is None:
        _used_in = os.getpid()
    elif _used_in != os.getpid():
        raise StorageError(
            f"object stores were used in process {_used_in} before it was forked, and cannot be used in the fork: "
            "start processes with multiprocessing's 'spawn' or 'forkserver' method"
        )

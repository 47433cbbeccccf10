"""Whose turn it is among endpoints, and how each is doing.

An endpoint that fails several times running, or that refuses, is left out. While requests go on elsewhere it is probed
in the background, less and less often, and taken back once it answers. With none left all are asked: one may be back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ObjectNotFound, PenstockError, StorageError, TransientStoreError
from penstock.storage.client import ObjectClient
from penstock.storage.hedging import Pace

_log = logging.getLogger(__name__)
_OUT_AFTER = 3
"""Failures running that take an endpoint out: one alone is a bad moment."""
_FIRST_PROBE_S = 1.0
_LONGEST_PROBE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """How an endpoint has been doing, in this process."""

    name: str
    """Where it is, without secrets."""
    is_in: bool
    """Whether it is asked in turn."""
    requests: int
    failures: int
    """Of all requests, those that failed or were refused."""
    last_failure: str
    """What it answered when it last failed, without secrets; empty where it never did."""


class Endpoint:
    """One endpoint and how it is doing; changed by its `Rotation` alone."""

    def __init__(self, client: ObjectClient) -> None:
        self.client = client
        self.name = client.address.told
        self.is_in = True
        self.is_probed = False
        self.requests = 0
        self.failures = 0
        self.running = 0
        """Failures since it last answered."""
        self.last_failure = ""
        self.probe_at = 0.0
        self.probe_wait_s = _FIRST_PROBE_S
        self.looks, self.answers, self.bodies = Pace(), Pace(), Pace()
        """How long it takes to look at an object; to begin an answer with one; a mebibyte of that, to arrive."""

    def health(self) -> EndpointHealth:
        return EndpointHealth(
            name=self.name,
            is_in=self.is_in,
            requests=self.requests,
            failures=self.failures,
            last_failure=self.last_failure,
        )


class Rotation:
    """Endpoints in turn. Safe for threads."""

    def __init__(self, clients: Sequence[ObjectClient]) -> None:
        self._lock = threading.Lock()
        self._is_back = threading.Condition(self._lock)
        self._endpoints = [Endpoint(client) for client in clients]
        self._turn = 0
        self._known_key = ""
        """Something that is there, to probe with."""

    def health(self) -> tuple[EndpointHealth, ...]:
        with self._lock:
            return tuple(endpoint.health() for endpoint in self._endpoints)

    def next_order(self) -> list[Endpoint]:
        """The endpoints for one request: those that are in, from the next in turn on, then the others."""
        now = time.monotonic()
        with self._lock:
            turn, self._turn = self._turn, self._turn + 1
            inside = [endpoint for endpoint in self._endpoints if endpoint.is_in]
            outside = [endpoint for endpoint in self._endpoints if not endpoint.is_in]
            # Without one that is in, the requests themselves are the probes.
            can_probe = bool(inside and self._known_key)
            due = [end for end in outside if can_probe and not end.is_probed and now >= end.probe_at]
            for endpoint in due:
                endpoint.is_probed = True
            key = self._known_key
        for endpoint in due:
            threading.Thread(target=self._probe, args=(endpoint, key), name="penstock-probe", daemon=True).start()
        first = turn % len(inside) if inside else 0
        return inside[first:] + inside[:first] + outside

    def pause(self, seconds: float) -> None:
        """Wait; no longer than until an endpoint that was out is back, which is what one waits for."""
        with self._is_back:
            self._is_back.wait(seconds)

    def note_answer(self, endpoint: Endpoint, key: str = "") -> None:
        """It answered; `key` is an object that is there."""
        with self._lock:
            endpoint.requests += 1
            was_out, endpoint.is_in = not endpoint.is_in, True
            endpoint.running, endpoint.is_probed, endpoint.probe_wait_s = 0, False, _FIRST_PROBE_S
            self._known_key = key or self._known_key
            if was_out:
                self._is_back.notify_all()
        if was_out:
            _log.warning("%s answers again and is asked in turn", endpoint.name)

    def note_failure(self, endpoint: Endpoint, error: StorageError, *, probing: bool = False) -> None:
        """It failed, or refused: the second will not pass by itself, and whoever runs this is told so."""
        refused = not isinstance(error, TransientStoreError)
        with self._lock:
            endpoint.requests += 1
            endpoint.failures += 1
            endpoint.running += 1
            endpoint.last_failure = str(error)
            leaves = endpoint.is_in and (refused or endpoint.running >= _OUT_AFTER)
            if leaves:
                endpoint.is_in = False
            elif probing:
                endpoint.probe_wait_s = min(_LONGEST_PROBE_S, endpoint.probe_wait_s * 2)
            if leaves or probing:
                endpoint.is_probed = False
                endpoint.probe_at = time.monotonic() + endpoint.probe_wait_s
        if leaves and refused:
            _log.error("%s is left out until it is mended: %s", endpoint.name, error)
        elif leaves:
            _log.warning("%s is left out until it answers again: %s", endpoint.name, error)

    def _probe(self, endpoint: Endpoint, key: str) -> None:
        """Ask an endpoint that is out for an object that another one has; any answer but a failure takes it back."""
        try:
            endpoint.client.head(key)
        except ObjectNotFound:
            self.note_answer(endpoint)
        except StorageError as error:
            self.note_failure(endpoint, error, probing=True)
        except PenstockError as error:
            self.note_failure(endpoint, StorageError(str(error)), probing=True)
        else:
            self.note_answer(endpoint, key)

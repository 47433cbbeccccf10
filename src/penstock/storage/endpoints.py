"""One data set on several endpoints or buckets: read from all of them in turn, going on where one fails or is slow.

request ──► Race ──► Rotation      whose turn it is, and how each endpoint is doing
              │ ───► Lanes         the requests, each in a thread: one that is slow is overtaken, not waited for
              └ ───► hedging.py    when one is slow, and how many may be asked for twice
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

from penstock.errors import ConfigError, PreconditionFailed, StorageError
from penstock.storage.attempts import Ask
from penstock.storage.base import ObjectInfo
from penstock.storage.client import ObjectClient
from penstock.storage.hedging import HedgeAllowance
from penstock.storage.keys import RESERVED, check_key, check_offset, check_prefix, check_range
from penstock.storage.lanes import Lanes
from penstock.storage.object_reads import ReadsObjects
from penstock.storage.objects import ObjectStorage
from penstock.storage.partial import PartialRead
from penstock.storage.racing import Race
from penstock.storage.ranged import open_ranged
from penstock.storage.retry import Budgets, RetryBudget
from penstock.storage.rotation import Endpoint, EndpointHealth, Rotation

_log = logging.getLogger(__name__)
_DIGEST = re.compile(r'"?[0-9a-f]{32}"?')
"""An ETag that is the MD5 of an object's bytes, mostly; of one uploaded in parts it has another form."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedInfo(ObjectInfo):
    """What one endpoint told of an object that all of them have."""

    seen: dict[str, ObjectInfo] = field(default_factory=dict[str, ObjectInfo], compare=False, repr=False)
    """What each endpoint told when it was first asked for this object on behalf of this look. The same bytes may have
    another version elsewhere, uploaded in parts of another size; at one endpoint they keep the one they have."""


class EndpointStorage(ReadsObjects):
    """`ReadableStorage` over several stores with the same objects. Shared by threads; pickles to spawned processes.

    Each endpoint has its own bucket and credentials. Reading never takes half an object from one and half from another
    that differs: what broke off goes on elsewhere only where version and size are the same, else it begins again.
    A request without an answer after twice the usual time is made at another endpoint as well, and the first answer is
    taken; at most a tenth of all requests are. `ObjectNotFound` is believed once every endpoint says so; one that
    misses what another has is told in the log. An endpoint that refuses (wrong credentials, no such bucket) is asked
    once a request, left out and logged as an error, and reading goes on elsewhere: it is an error itself only where no
    endpoint is left that could answer.
    """

    def __init__(self, stores: Sequence[ObjectStorage], *, budgets: Budgets | None = None) -> None:
        if not stores:
            raise ConfigError("no endpoints were given: expected one or more")
        self._stores = tuple(stores)
        self.budgets = budgets or Budgets()
        self._rotation = Rotation([ObjectClient(store.address, store.timeouts) for store in stores])
        self._lanes = Lanes()
        self._allowance = HedgeAllowance()
        self._told_different = False

    def __getstate__(self) -> tuple[tuple[ObjectStorage, ...], Budgets]:
        return self._stores, self.budgets

    def __setstate__(self, state: tuple[tuple[ObjectStorage, ...], Budgets]) -> None:
        stores, budgets = state
        self.__init__(stores, budgets=budgets)

    @property
    def stores(self) -> tuple[ObjectStorage, ...]:
        """The stores themselves, in the order they were given."""
        return self._stores

    @property
    def url(self) -> str:
        return " | ".join(store.url for store in self._stores)

    def __repr__(self) -> str:
        return f"EndpointStorage({[store.address.told for store in self._stores]!r})"

    def health(self) -> tuple[EndpointHealth, ...]:
        """How each endpoint is doing, in the order they were given."""
        return self._rotation.health()

    def get_range_of(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of the object that `info` tells of, from whichever endpoint answers.

        Every endpoint must have as many bytes, and is held to the version that it first had when it was asked by this
        `info`: `PreconditionFailed` where it was written since. What an endpoint was given before it was first asked is
        not known: it goes by size. That `info` is the one of `head`; another goes by size alone.
        """
        check_range(info.key, start, stop)
        if start >= min(stop, info.size_bytes):
            return b""
        seen = info.seen if isinstance(info, SharedInfo) else {}
        partial = PartialRead(start, stop)

        def pin(endpoint: Endpoint) -> str | None:
            known = seen.get(endpoint.name)
            return known.version if known is not None else None

        endpoint = self._read_from(info.key, partial, pin=pin)
        got = partial.info or ObjectInfo(info.key, 0)
        if got.size_bytes != info.size_bytes:
            raise StorageError(
                f"{info.key} had {info.size_bytes} bytes when it was opened, got {got.size_bytes}: it was written "
                f"again, or the endpoints ({self.url}) do not hold the same data; make them the same"
            )
        first = seen.setdefault(endpoint.name, got)
        self._tell_different(seen)
        if (first.version or first.modified) != (got.version or got.modified):
            raise PreconditionFailed(f"{endpoint.name}: {info.key} was written again: expected {first}, got {got}")
        return partial.joined()

    def _tell_different(self, seen: dict[str, ObjectInfo]) -> None:
        """Say once where endpoints name digests of content that differ. It is no proof: under some kinds of encryption
        they are no digests."""
        if self._told_different or len(seen) < 2:
            return
        digests = {name: info.version for name, info in list(seen.items()) if _DIGEST.fullmatch(info.version or "")}
        if len(set(digests.values())) > 1:
            self._told_different = True
            told = "; ".join(f"{name}: {version}" for name, version in digests.items())
            key = next(iter(seen.values())).key
            _log.warning("%s seems to be another object on each endpoint (%s): make sure that it is not", key, told)

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        check_offset(key, start)
        info = self.head(key)
        return open_ranged(info, key, lambda first, stop: self.get_range_of(info, first, stop), start)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        found, endpoint = self._race(key, lambda client, _: client.head(key), self.budgets.metadata)
        return SharedInfo(key, found.size_bytes, found.version, found.modified, {endpoint.name: found})

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found: dict[ObjectClient, dict[str, ObjectInfo]] = {}

        def listed(client: ObjectClient, part: PartialRead) -> dict[str, ObjectInfo]:
            part.answered_at = time.monotonic()  # a long list may take longer than the deadline, as long as it goes on
            pages = found.setdefault(client, {})  # each endpoint's own: they may list in different orders
            client.list_on(prefix, pages)
            return pages

        whole, _ = self._race("", listed, self.budgets.metadata, what=prefix, hedged=False)
        for key in sorted(whole):
            if key.startswith(prefix) and not key.endswith(RESERVED):
                yield whole[key]

    def _what(self, key: str) -> str:
        return key

    def _read(self, key: str, partial: PartialRead) -> None:
        self._read_from(key, partial)

    def _read_from(self, key: str, partial: PartialRead, **more: Any) -> Endpoint:
        def read(client: ObjectClient, part: PartialRead) -> None:
            client.read_on(key, part)

        return self._race(key, read, self.budgets.data, partial=partial, **more)[1]

    def _race(self, key: str, ask: Ask[T], budget: RetryBudget, **more: Any) -> tuple[T, Endpoint]:
        return Race(self._rotation, self._lanes, self._allowance, ask, budget, key=key, **more).run()

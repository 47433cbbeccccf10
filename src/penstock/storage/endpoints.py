"""One data set on several endpoints or buckets: read from all of them in turn, going on where one fails.

    request ──► next endpoint in turn ──► answer
                     │ fails
                     ▼
                the one after it, and so on; when all have failed: wait, and round again, until the budget is spent

Who is asked when, and what becomes of one that fails, is in `rotation.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, TypeVar

from penstock.errors import AccessDenied, ConfigError, ObjectNotFound, StorageError, TransientStoreError
from penstock.storage.base import ObjectInfo
from penstock.storage.client import ObjectClient, PartialRead
from penstock.storage.keys import RESERVED, check_key, check_offset, check_prefix, check_range
from penstock.storage.object_reads import ReadsObjects
from penstock.storage.objects import ObjectStorage
from penstock.storage.ranged import open_ranged
from penstock.storage.retry import Budgets, Patience, RetryBudget
from penstock.storage.rotation import Endpoint, EndpointHealth, Rotation

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EndpointStorage(ReadsObjects):
    """`ReadableStorage` over several stores with the same objects. Shared by threads; pickles to spawned processes.

    Each endpoint has its own bucket and credentials. Reading never takes half an object from one and half from another
    that differs: what broke off goes on elsewhere only where version and size are the same, else it begins again.
    `ObjectNotFound` is believed once every endpoint says so; one that misses what another has is told in the log. An
    endpoint that refuses (wrong credentials, no such bucket) is asked once a request, left out and logged as an error,
    and reading goes on elsewhere: it is an error itself only where no endpoint is left that could answer.
    """

    def __init__(self, stores: Sequence[ObjectStorage], *, budgets: Budgets | None = None) -> None:
        if not stores:
            raise ConfigError("no endpoints were given: expected one or more")
        self._stores = tuple(stores)
        self.budgets = budgets or Budgets()
        self._rotation = Rotation([ObjectClient(store.address, store.timeouts) for store in stores])

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
        """Bytes ``[start, stop)`` of an object as large as `info` tells of, from whichever endpoint answers.

        By size alone: the same bytes uploaded in parts of another size have another version.
        """
        check_range(info.key, start, stop)
        if start >= min(stop, info.size_bytes):
            return b""
        partial = PartialRead(start, stop)
        self._read(info.key, partial)
        got = partial.info.size_bytes if partial.info is not None else 0
        if got != info.size_bytes:
            raise StorageError(
                f"{info.key} had {info.size_bytes} bytes when it was opened, got {got}: it was written again, or the "
                f"endpoints ({self.url}) do not hold the same data; make them the same"
            )
        return partial.joined()

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        check_offset(key, start)
        info = self.head(key)
        return open_ranged(info, key, lambda first, stop: self.get_range_of(info, first, stop), start)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return self._anywhere(lambda client: client.head(key), self.budgets.metadata, key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found: dict[ObjectClient, dict[str, ObjectInfo]] = {}

        def listed(client: ObjectClient) -> dict[str, ObjectInfo]:
            pages = found.setdefault(client, {})  # each endpoint's own: they may list in different orders
            client.list_on(prefix, pages)
            return pages

        whole = self._anywhere(listed, self.budgets.metadata, prefix, is_key=False)
        for key in sorted(whole):
            if key.startswith(prefix) and not key.endswith(RESERVED):
                yield whole[key]

    def _what(self, key: str) -> str:
        return key

    def _read(self, key: str, partial: PartialRead) -> None:
        self._anywhere(lambda client: client.read_on(key, partial), self.budgets.data, key, partial=partial)

    def _anywhere(
        self,
        ask: Callable[[ObjectClient], T],
        budget: RetryBudget,
        key: str,
        *,
        partial: PartialRead | None = None,
        is_key: bool = True,
    ) -> T:
        """Ask one endpoint after the other until one answers, round after round until the budget is spent.

        The deadline counts from the beginning and holds within a round as well. Between rounds we wait, not between
        endpoints: the next one is not to blame."""
        answers: dict[Endpoint, StorageError] = {}
        began = time.monotonic()
        patience = Patience(budget=budget, what=f"{key or 'a list'} on {len(self._stores)} endpoints", began_at=began)
        while True:
            for endpoint in self._rotation.next_order():
                if endpoint in answers and not isinstance(answers[endpoint], TransientStoreError):
                    continue  # asking again changes nothing
                if answers and time.monotonic() - (patience.began_at or began) > budget.deadline_s:
                    break
                before = partial.arrived if partial is not None else 0
                try:
                    found = ask(endpoint.client)
                except StorageError as error:
                    answers[endpoint] = error
                    self._note(endpoint, error)
                    if partial is not None:
                        patience.refresh(max(0, partial.arrived - before))
                else:
                    self._rotation.note_answer(endpoint, key if is_key else "")
                    _tell_missing(key, endpoint, answers)
                    return found
            _refuse_for_good(key, answers)
            patience.spend(TransientStoreError(_told(answers)))

    def _note(self, endpoint: Endpoint, error: StorageError) -> None:
        if isinstance(error, ObjectNotFound):
            self._rotation.note_answer(endpoint)  # an answer, if not the one hoped for
        else:
            self._rotation.note_failure(endpoint, error)


def _tell_missing(key: str, having: Endpoint, answers: dict[Endpoint, StorageError]) -> None:
    for endpoint, error in answers.items():
        if isinstance(error, ObjectNotFound):
            _log.warning("%s misses %s, which %s has: copy it there", endpoint.name, key, having.name)


def _refuse_for_good(key: str, answers: dict[Endpoint, StorageError]) -> None:
    """Raise where no further round can change anything: nobody is left whom it makes sense to ask again."""
    if any(isinstance(error, TransientStoreError) for error in answers.values()):
        return
    kinds = {type(error) for error in answers.values()}
    kind = kinds.pop() if len(kinds) == 1 else AccessDenied if AccessDenied in kinds else StorageError
    raise kind(f"{key or 'the list'} is on none of the endpoints: {_told(answers)}")


def _told(answers: dict[Endpoint, StorageError]) -> str:
    return "; ".join(f"[{number}] {end.name}: {error}" for number, (end, error) in enumerate(answers.items(), start=1))

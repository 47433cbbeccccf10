"""Pages loaded ahead of whoever uses them, several at a time, and handed out in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence

from penstock.errors import BadRowError, PageError, PenstockError
from penstock.pages.budget import ByteBudget
from penstock.pages.choice import Page
from penstock.pages.requests import Requests
from penstock.pages.tokens import Claim, PageTokens

_LOOK_S = 5.0
_JOIN_S = 5.0

Load = Callable[[Page, Requests, Claim], PageTokens]


class PagePipeline:
    """Loads pages in threads: the one that is needed next and up to `ahead` behind it.

    Bounded by requests (`max_requests`, over all pages) and by bytes (`budget_bytes`, see `ByteBudget`). A page that
    cannot be read is a `PageError` in its place, behind the pages before it; nothing is left out. Closing ends the
    threads, each after the request it is at.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        load: Load,
        *,
        ahead: int,
        max_requests: int,
        budget_bytes: int,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._pages = pages
        self._load = load
        self._ahead = max(0, ahead)
        self._requests = Requests(max_requests)
        self.budget = ByteBudget(budget_bytes)
        self._on_wait = on_wait
        self._changed = threading.Condition()
        self._ready: dict[int, PageTokens | BaseException] = {}
        self._begun = 0
        self._used = 0
        self._closing = False
        self._threads: list[threading.Thread] = []

    def __iter__(self) -> Generator[PageTokens, None, None]:
        """The pages in order, once. What is handed out may be used until the next is asked for."""
        for _ in range(min(self._ahead + 1, len(self._pages))):
            thread = threading.Thread(target=self._run, name="penstock pages", daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            for number in range(len(self._pages)):
                yield self._wait_for(number)
                refuse_forked(self._pid)
                self.budget.give(number)
                with self._changed:
                    self._used = number + 1
                    self._changed.notify_all()
        finally:
            self.close()

    def close(self, timeout_s: float = _JOIN_S) -> bool:
        """End the threads; says whether they have ended within the time. They are the business of their own process."""
        if self._pid != os.getpid():
            return True
        with self._changed:
            self._closing = True
            self._ready.clear()
            self._changed.notify_all()
        self.budget.close()
        threads = [*self._threads, *self._requests.close()]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _wait_for(self, number: int) -> PageTokens:
        began = time.perf_counter()
        with self._changed:
            while number not in self._ready:
                self._changed.wait(_LOOK_S)
                if number not in self._ready and not any(thread.is_alive() for thread in self._threads):
                    raise PenstockError("the threads that load pages ended without a word: forked? spawn processes")
            found = self._ready.pop(number)
        if self._on_wait is not None:
            self._on_wait(time.perf_counter() - began)
        if isinstance(found, BaseException):
            raise found
        return found

    def _run(self) -> None:
        while (number := self._next()) is not None:
            try:
                found: PageTokens | BaseException = load_page(
                    self._pages[number], self._load, self._requests, self.budget.claim(number)
                )
                self.budget.change(number, found.ids.nbytes + found.offsets.nbytes)
            except BaseException as error:  # noqa: BLE001 - told to whoever waits for the page
                found = error
                self.budget.give(number)
            with self._changed:
                if self._closing:
                    return
                self._ready[number] = found
                self._changed.notify_all()

    def _next(self) -> int | None:
        """The next page to load; waits until it may be."""
        with self._changed:
            while not self._closing and self._begun < len(self._pages) and self._begun > self._used + self._ahead:
                self._changed.wait(_LOOK_S)
            if self._closing or self._begun >= len(self._pages):
                return None
            self._begun += 1
            return self._begun - 1


def refuse_forked(pid: int) -> None:
    """Stop where an iteration of another process goes on in this one: no thread came along, and locks may be held by
    those that did not."""
    if pid != os.getpid():
        raise PenstockError(
            f"the iteration was begun by process {pid} and goes on in a fork of it, {os.getpid()}, where nobody loads "
            "pages: iterate anew there, or spawn processes"
        )


def load_page(page: Page, load: Load, requests: Requests, claim: Claim) -> PageTokens:
    """Load one page; whatever goes wrong names it."""
    try:
        return load(page, requests, claim)
    except BadRowError as error:
        raise BadRowError(f"{page.told}: {error}") from error
    except PenstockError as error:
        raise PageError(f"{page.told} cannot be read: {error}") from error

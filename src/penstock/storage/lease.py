"""A lock on an object store: an object that its holder renews, and that may be taken once it is renewed no more.

No clocks of two machines are compared. Whoever finds the lock taken looks at whether its holder is alive: at once
where that can be seen (the same machine), else by watching for a renewal. One that stays away for the whole of
`LEASE_S` means a dead holder. The holder, for its part, does not trust a lock that it could not renew for so long.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ObjectNotFound, PreconditionFailed, StorageBusy, StorageError, TransientStoreError
from penstock.storage.base import StillHeld
from penstock.storage.client import ObjectClient
from penstock.storage.keys import LOCK_SUFFIX, check_key
from penstock.storage.partial import PartialRead
from penstock.storage.retry import RetryBudget, with_retries

_log = logging.getLogger(__name__)
LEASE_S = 30.0
RENEW_S = 5.0
_LOOK_S = 1.0
_MARGIN = 0.8
"""Of a lease, after which its holder no longer takes it for its own."""
_MOST_BYTES = 4096
_TURNS = 20


@contextmanager
def leased(client: ObjectClient, name: str, *, purpose: str, budget: RetryBudget) -> Iterator[StillHeld]:
    """Hold the lock `name`, or raise `StorageBusy`; see `Storage.exclusive`."""
    check_key(name)
    lease = _Lease(client, name + LOCK_SUFFIX, purpose, budget)
    lease.take()
    lease.keep()

    def still_held() -> None:
        if lost := lease.lost_by_now():
            raise StorageBusy(
                f"{client.address.url}: the lock {name} was lost ({lost}), and another process may be writing: run it "
                "again once that one has ended"
            )

    try:
        yield still_held
    finally:
        lease.leave()
    if lease.lost:
        raise StorageBusy(
            f"{client.address.url}: the lock {name} was lost while it was held ({lease.lost}): another process may "
            "have written as well; check what was written, and run it again"
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A lock somebody holds."""

    holder: str
    machine: str
    pid: int
    begun: str
    renewed: float
    version: str


class _Lease:
    def __init__(self, client: ObjectClient, key: str, purpose: str, budget: RetryBudget) -> None:
        self._client = client
        self._key = key
        self._budget = budget
        self._holder = {
            "holder": f"process {os.getpid()} for {purpose} on {socket.gethostname()}",
            "machine": _machine(),
            "pid": os.getpid(),
            "begun": _begun(os.getpid()),
            "token": secrets.token_hex(16),
        }
        self._version = ""
        self._renewed_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
        self.lost = ""
        """Why it is no longer ours, where it is not."""

    def take(self) -> None:
        watched: _Found | None = None
        since = time.monotonic()
        while True:
            self._renewed_at = time.monotonic()
            found = self._retried(self._try_to_create)
            if found is None:
                return
            if _is_over(found) or (
                watched is not None and found.version == watched.version and time.monotonic() - since > LEASE_S
            ):
                if self._retried(lambda found=found: self._try_to_replace(found.version)):
                    return
                watched = None
                continue
            if found.machine == self._holder["machine"] or (watched is not None and found.version != watched.version):
                raise StorageBusy(
                    f"{self._client.address.url} is in use by {found.holder}: wait until it ends, or stop it"
                )
            if watched is None:
                watched, since = found, time.monotonic()
            time.sleep(min(_LOOK_S, LEASE_S / 10))

    def keep(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        self._ended.set()
        self._thread.join()
        self.lost = self.lost_by_now()
        if self.lost:
            return
        try:
            self._retried(lambda: self._client.delete(self._key))
        except ObjectNotFound:
            return
        except StorageError as error:  # what was done under the lock is done
            _log.warning("the lock is not given back and runs out in %.0f s: %s", LEASE_S, error)

    def lost_by_now(self) -> str:
        """Why it is not ours any more, or may not be; empty where it is."""
        if self.lost or self._is_good():
            return self.lost
        return f"not renewed for {time.monotonic() - self._renewed_at:.0f} s"

    def _try_to_create(self) -> _Found | None:
        """None where the lock is ours now; else who holds it."""
        for _ in range(_TURNS):
            try:
                self._version = self._put()
                return None
            except PreconditionFailed:
                pass
            try:
                found, token = self._look()
            except ObjectNotFound:  # given back in between
                continue
            if token == self._holder["token"]:  # a try of ours whose answer was lost
                self._version = found.version
                return None
            return found
        raise TransientStoreError(f"{self._client.what(self._key)}: it is taken whenever asked for, and then not there")

    def _try_to_replace(self, version: str) -> bool:
        try:
            self._version = self._put(version)
        except (PreconditionFailed, ObjectNotFound):
            return self._is_ours()
        return True

    def _is_ours(self) -> bool:
        try:
            found, token = self._look()
        except ObjectNotFound:
            return False
        if token == self._holder["token"]:
            self._version = found.version
            return True
        return False

    def _renew(self) -> None:
        """Until the end: write the lock again before it runs out, which changes its version for those who watch."""
        wait_s = RENEW_S
        while not self._ended.wait(wait_s):
            began = time.monotonic()
            try:
                if not self._try_to_replace(self._version):
                    self.lost = "another process took it"
                    return
                self._renewed_at, wait_s = began, RENEW_S
            except TransientStoreError:
                wait_s = RENEW_S / 5
            except StorageError as error:
                self.lost = str(error)
                return
            self.lost = self.lost_by_now()
            if self.lost:
                return

    def _is_good(self) -> bool:
        return time.monotonic() - self._renewed_at < LEASE_S * _MARGIN

    def _put(self, replacing: str | None = None) -> str:
        told = json.dumps({**self._holder, "renewed": _now_s(), "renewal": secrets.token_hex(8)}).encode()
        info = self._client.put(self._key, told, if_absent=replacing is None, replacing=replacing)
        return info.version or ""

    def _look(self) -> tuple[_Found, str]:
        partial = PartialRead(0, _MOST_BYTES)
        self._client.read_on(self._key, partial)
        version = partial.info.version if partial.info else None
        try:
            told: dict[str, Any] = json.loads(partial.joined())
            found = _Found(
                str(told["holder"])[:200],
                str(told["machine"]),
                int(told["pid"]),
                str(told["begun"]),
                float(told["renewed"]),
                version or "",
            )
            return found, str(told["token"])
        except (ValueError, KeyError, TypeError):
            return _Found("another process", "", 0, "", 0.0, version or ""), ""

    def _retried(self, operation: Any) -> Any:
        return with_retries(operation, self._budget, self._client.what(self._key))


def _machine() -> str:
    """This boot of this machine, and which process numbers and clocks are meant: containers may have their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/time"))
    try:
        return " ".join([boot.read_text(encoding="ascii").strip(), *(str(space.readlink()) for space in spaces)])
    except OSError:
        return secrets.token_hex(16)  # nobody's but ours


def _now_s() -> float:
    """Seconds of this boot, the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _begun(pid: int) -> str:
    """When a process began, in ticks of this boot; empty where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_over(found: _Found) -> bool:
    """Whether the holder was of this machine, and is no more, or has not renewed for too long."""
    if not found.machine or found.machine != _machine():
        return False
    return _begun(found.pid) != found.begun or _now_s() - found.renewed > LEASE_S

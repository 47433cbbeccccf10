"""Keeps a session alive while its worker lives, however long a step takes."""

from __future__ import annotations

import logging
import threading

from penstock.errors import LedgerError
from penstock.ledger import Ledger, Session

_log = logging.getLogger(__name__)


class Heartbeat:
    """A thread that renews one session. Ends with the `with` block, and by itself once the session is lost."""

    def __init__(self, ledger: Ledger, session: Session, *, every_s: float) -> None:
        self._ledger = ledger
        self._session = session
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat {session.worker}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._ledger.heartbeat(self._session)
            except LedgerError as error:  # the loop meets the same error at its next claim and decides there
                _log.warning("heartbeat of %s ended: %s", self._session.worker, error)
                break
        self._ledger.close()

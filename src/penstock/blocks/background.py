"""A raw data set becoming blocks in a thread, while the first of them are read already."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from penstock.blocks.cutting import IngestProgress
from penstock.blocks.ingesting import WRITER, write_blocks
from penstock.blocks.raw import RawDataset
from penstock.blocks.store import finished_manifest
from penstock.errors import BlockStoreError, PenstockError, StorageBusy
from penstock.storage import LocalStorage

_BUSY_POLL_S = 0.2
_GOODBYE_S = 5.0
_POLL_S = 0.02
_LONGEST_POLL_S = 0.5


class _Stopped(PenstockError):
    """The reader went away: the ingest ends where it stands, and another goes on from there."""


class BackgroundIngest:
    """Ingests a raw data set in a thread of this process, unless another process does it: then it stands by, to go on
    should that one die. Ends with `stop`, with its owner, and with the process; what was finished is kept."""

    def __init__(self, raw: RawDataset) -> None:
        self._raw = raw
        self._work = _Work(raw)
        self._thread = threading.Thread(target=self._work.run, name="penstock ingest", daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._work, self._thread)  # at exit as well

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._finalizer()

    def check(self) -> None:
        """Raise what the ingest failed with, where it failed: a read error is never taken for the end."""
        if self._work.error is not None:
            raise self._work.error

    def wait_for(self, is_there: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Wait until something has landed, as long as the ingest gets on."""
        seen, since, poll_s = None, time.monotonic(), _POLL_S
        while not is_there():
            self.check()
            sign = self._work.sign
            if sign != seen:
                seen, since = sign, time.monotonic()
            elif time.monotonic() - since > timeout_s:
                raise BlockStoreError(
                    f"{what} of {self._raw.spec} did not come: its ingest has not moved for {timeout_s:.0f} s; "
                    f"see whether another process is stuck that writes {self._raw.store_path}"
                )
            time.sleep(poll_s)
            poll_s = min(_LONGEST_POLL_S, poll_s * 1.5)


class _Work:
    """What the thread does; knows nothing of its owner, so that the owner can go."""

    def __init__(self, raw: RawDataset) -> None:
        self._raw = raw
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.sign = 0
        """Changes while the ingest gets on."""

    def run(self) -> None:
        try:
            while not self.stopping.is_set() and not self._try():
                self.stopping.wait(_BUSY_POLL_S)
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - told to whoever asks for a block
            self.error = error

    def _try(self) -> bool:
        storage = LocalStorage(self._raw.store_path)
        try:
            with storage.exclusive(WRITER, purpose="ingesting") as still_held:
                if finished_manifest(storage) is None:
                    source = self._raw.open_source()
                    on_bad_row = self._raw.request.on_bad_row
                    write_blocks(storage, source, self._raw.header, on_bad_row, self._get_on, still_held)
                return True
        except StorageBusy:
            return finished_manifest(storage) is not None

    def _get_on(self, progress: IngestProgress) -> None:
        self.sign += 1
        if self.stopping.is_set():
            raise _Stopped


def _end(work: _Work, thread: threading.Thread) -> None:
    work.stopping.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_GOODBYE_S)  # one that waits for the network may take longer: it is cut off, as by a crash

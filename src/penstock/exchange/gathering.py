"""Gathering a window: contributions are checked as they come, and added up one by one, in a fixed order.

One is checked while others are read: by the thread that has read it where it is large, by the caller where it is small.
(A check is some twenty calls, each of which lets go of the interpreter and asks for it again. Where they take
microseconds, threads that check at a time spend more on handing it round than on the checks.)
Memory is bounded by bytes: checked contributions are kept as long as they fit, the others are read again, at the very
version that was checked, when their turn comes. However many there are, the sum is one buffer.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.errors import ArtifactRejected
from penstock.exchange.artifacts import Artifact
from penstock.exchange.codec import ContributionCodec
from penstock.exchange.manifests import Rejected
from penstock.exchange.receiving import OpenWindow, Received, Receiver, TooLate
from penstock.storage import ObjectInfo

_log = logging.getLogger(__name__)
GATHER_BYTES = 256 << 20
_REQUESTS = 8
_LARGE_BYTES = 4 << 20
"""From here on a contribution is checked by the thread that has read it."""
_TOLD = 5
"""Miners that a line of the log names."""
_EMPTY = Artifact({}, {}, "")


@dataclass(frozen=True, slots=True)
class _Read:
    """A contribution that came in time, unchecked."""

    uid: str
    data: memoryview
    info: ObjectInfo


class Gathering:
    """The contributions of one window, as far as they have come. Closing it ends its threads."""

    def __init__(
        self,
        receiver: Receiver,
        expected: OpenWindow,
        *,
        budget_bytes: int = GATHER_BYTES,
        usual_norms: Sequence[float] = (),
        norm_factor: float = 10.0,
        max_norm: float = math.inf,
    ) -> None:
        """Begin with nothing.

        Args:
            receiver: Reads and checks.
            expected: The window.
            budget_bytes: How much memory contributions may take, beside the sum; one alone may take more.
            usual_norms: Norms of contributions of the windows before.
            norm_factor: How far from what is usual a norm may be.
            max_norm: How large a norm may be, whatever is usual.
        """
        self._receiver = receiver
        self.expected = expected
        self._budget = max(0, budget_bytes)
        self._usual = list(usual_norms)
        self._factor = norm_factor
        self._max_norm = max_norm
        self.received: dict[str, Received] = {}
        """Those that were found sound, with their content as far as it is kept."""
        self.rejected: dict[str, Rejected] = {}
        self._late: dict[str, float] = {}
        """When those were written that came behind the window's time."""
        self._lock = threading.Lock()
        self._held = 0
        self._at_once = min(2 * _REQUESTS, max(1, self._budget // (2 * receiver.limit_bytes)))
        """How many may be in memory unchecked."""
        self._pool = ThreadPoolExecutor(min(_REQUESTS, self._at_once), thread_name_prefix="gather")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def look(self, uids: Sequence[str], closes_at: float) -> None:
        """See what has come since, and check it. Each worker's contribution is judged once."""
        self.expected = replace(self.expected, closes_at=closes_at)
        judged = self.received.keys() | self.rejected.keys()
        # What was late stays so until the window is made longer: written again, it would be later still.
        late = {uid for uid, written_at in self._late.items() if written_at > closes_at}
        waiting = [uid for uid in uids if uid not in judged and uid not in late]
        coming: deque[Future[_Read | None]] = deque()
        try:
            for uid in waiting:
                if len(coming) == self._at_once:
                    self._check(coming.popleft().result())
                coming.append(self._pool.submit(self._read, uid))
            while coming:
                self._check(coming.popleft().result())
        finally:
            for each in coming:
                each.cancel()

    def heads(self, uids: Sequence[str], window: int) -> dict[str, ObjectInfo]:
        """What lies there for another window, by small requests, several at a time."""
        found = self._pool.map(lambda uid: self._receiver.look(uid, window), uids)
        return {uid: info for uid, info in zip(uids, found, strict=True) if info is not None}

    def tell_open(self, peers: Sequence[str]) -> None:
        """Too little has come: what did, and what is wrong with it, goes to the log, since no manifest tells yet."""
        wrong = [f"{each.uid} {each.reason} ({each.told})" for each in self.rejected.values()]
        wrong += [f"{uid} late" for uid in self._late]
        heard = self.received.keys() | self.rejected.keys() | self._late.keys()
        missing = [uid for uid in peers if uid not in heard]
        _log.warning(
            "window %d stays open past its time: rejected: %s; nothing from: %s",
            self.expected.window,
            ", ".join(wrong[:_TOLD]) or "none",
            ", ".join(missing[:_TOLD]) or "none",
        )

    def choose(self, uids: Sequence[str], seats: int) -> list[Received]:
        """The contributions that take the seats, in this order; those whose norm is out of all proportion do not."""
        there = [self.received[uid] for uid in uids if uid in self.received]
        usual = self._usual_norm()
        for each in there:
            if each.norm > self._max_norm:
                self.reject(each.uid, "norm", f"its norm is {each.norm:.4g}: expected at most {self._max_norm:g}")
            elif not usual / self._factor <= each.norm <= usual * self._factor or not each.norm:
                told = (
                    f"its norm is {each.norm:.4g}, usual is {usual:.4g}: expected at most {self._factor:g} times that"
                )
                told += ", or as much less"
                self.reject(each.uid, "norm", told)
        return [each for each in there if each.uid not in self.rejected][:seats]

    def fold(self, chosen: list[Received], codec: ContributionCodec) -> tuple[Tensor, list[Received]]:
        """Add them up, one by one in their order; those that can no longer be read are rejected and left out."""
        total = codec.new_total()
        folded: list[Received] = []
        for each in chosen:
            artifact = each.artifact
            if not artifact.tensors:
                again = self._read_again(each)
                if again is None:
                    continue
                artifact = again.artifact
            codec.fold(total, artifact.tensors)
            folded.append(each)
        return total, folded

    def reject_late(self) -> None:
        """The window is closed now: what came behind its time is late. Before that its time may be made longer."""
        for uid, written_at in self._late.items():
            behind = written_at - self.expected.closes_at
            if behind > 0:  # else it was not looked at again once there was more time: nobody expects it any more
                self.reject(uid, "late", f"written {behind:.0f} s after its window's time was over, grace included")

    def reject(self, uid: str, reason: str, told: str) -> None:
        self.rejected[uid] = Rejected(uid=uid, window=self.expected.window, reason=reason, told=told)

    def _usual_norm(self) -> float:
        """What is usual: the lower median of this window's and the last ones'."""
        norms = [each.norm for each in self.received.values() if 0 < each.norm <= self._max_norm] + self._usual
        return statistics.median_low(norms) if norms else 0.0

    def _read(self, uid: str) -> _Read | None:
        """Read what a worker sent, if it sent anything. What is small is left to the caller to check."""
        self._late.pop(uid, None)
        with self._judging(uid):
            found = self._receiver.read(uid, self.expected)
            if found is not None:
                read = _Read(uid, *found)
                if read.info.size_bytes < _LARGE_BYTES:
                    return read
                self._check(read)
        return None

    def _check(self, read: _Read | None) -> None:
        """Check what was read, and keep it if it is sound."""
        if read is not None:
            with self._judging(read.uid):
                self.received[read.uid] = self._kept(
                    self._receiver.check(read.uid, self.expected, read.data, read.info)
                )

    @contextmanager
    def _judging(self, uid: str) -> Iterator[None]:
        """Note what is wrong with a contribution."""
        try:
            yield
        except TooLate as error:
            self._late[uid] = error.written_at
        except ArtifactRejected as error:
            self.reject(uid, error.reason, error.told[:300])

    def _read_again(self, each: Received) -> Received | None:
        """What was not kept; None, and rejected, where it is no longer what was checked."""
        try:
            again = self._receiver.receive(each.uid, self.expected, seen=each.info)
        except ArtifactRejected as error:
            self.reject(each.uid, error.reason, error.told[:300])
            return None
        if again is None or again.artifact.digest != each.artifact.digest:
            self.reject(each.uid, "changed", "it was written again, or removed, after it had been checked")
            return None
        return again

    def _kept(self, received: Received) -> Received:
        """With its content where there is room for it, else without."""
        size = received.info.size_bytes
        with self._lock:
            if self._held + size <= self._budget // 2:
                self._held += size
                return received
        return replace(received, artifact=replace(_EMPTY, digest=received.artifact.digest))

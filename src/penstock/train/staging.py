"""Batches ahead of the step that learns them: on the device already, and the next chunk packed before it is claimed.

    ChunkFeed.window ──► batches ──► tensors on the device ──► handed out, with how long that was waited for
    └ of the next chunk └──── a thread, some batches ahead ───┘
      too, in a thread

Nothing here changes what is learned: a chunk that was prepared and is not the one asked for is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from penstock.errors import PenstockError
from penstock.feed import Batch, ChunkFeed, PackedWindow
from penstock.feed.prefetch import Prefetch
from penstock.train.device_batch import DeviceBatch, to_device
from penstock.types import ChunkRef

Excluded = tuple[tuple[int, int], ...]

_AHEAD = 3
"""Batches on the device beside the one in use: enough to cover a step that is slow to make, small beside a model."""
_END_S = 900.0


class Staging:
    """The batches of one chunk after another. One chunk at a time; holds the current window and one prepared."""

    def __init__(self, feed: ChunkFeed, device: torch.device) -> None:
        self._feed = feed
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._prepared: tuple[tuple[ChunkRef, Excluded], Future[PackedWindow]] | None = None
        self._current: tuple[tuple[ChunkRef, Excluded], PackedWindow] | None = None

    @property
    def sequence_count(self) -> int:
        """Of the chunk whose batches were asked for last."""
        return 0 if self._current is None else self._current[1].sequence_count

    def prepare_following(self, ref: ChunkRef) -> None:
        """Prepare the chunk behind one: a guess, of which nothing but time is lost where it is wrong."""
        following = self._feed.following(ref)
        if following is not None:
            self.prepare(following)

    def prepare(self, ref: ChunkRef, excluded: Excluded = ()) -> None:
        """Begin to read, tokenise and pack a chunk that will be asked for, or may be."""
        if self._prepared is not None and self._prepared[0] == (ref, excluded):
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="penstock next chunk")
        self._prepared = (ref, excluded), self._threads.submit(self._feed.window, ref, excluded)

    def batches(
        self, ref: ChunkRef, start_offset: int, excluded: Excluded = ()
    ) -> Generator[tuple[DeviceBatch, float], None, None]:
        """A chunk's batches from a sequence offset on, each with the seconds that were waited for it."""
        began = time.perf_counter()
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        window = self._window(ref, excluded)
        staged = (self._stage(batch) for batch in window.batches(self._feed.batch_size, start_offset))
        prefetch = Prefetch(staged, budget_bytes=_AHEAD, size_of=lambda _: 1)
        try:
            for batch in prefetch:
                batch.wait()
                yield batch, time.perf_counter() - began
                began = time.perf_counter()
        finally:
            if not prefetch.close(_END_S):
                raise PenstockError(f"the feed did not end within {_END_S:.0f} s: its storage hangs; start again")

    def close(self) -> None:
        """End the thread, after the chunk it is at."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _window(self, ref: ChunkRef, excluded: Excluded) -> PackedWindow:
        wanted = ref, excluded
        if self._current is None or self._current[0] != wanted:  # else a boundary came in between
            self._current = None  # before the next one is made: two of them are enough
            prepared, self._prepared = self._prepared, None
            hit = prepared[1] if prepared is not None and prepared[0] == wanted else None
            self._current = wanted, hit.result() if hit is not None else self._feed.window(ref, excluded)
        return self._current[1]

    def _stage(self, batch: Batch) -> DeviceBatch:
        return to_device(batch, self._device, self._stream)

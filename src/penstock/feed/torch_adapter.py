"""Batches as torch tensors, on the device before they are asked for. One of the few places that import torch.

    loader ──► numpy arrays ──► tensors in pinned memory ──► copied on a stream of their own ──► handed out
               └───────────── in a thread, some batches ahead ─────────────┘                    the consumer's stream
                                                                                                waits for the copy

Token ids become int64, which is what models index with. Texts and rows stay lists. What was not handed out does not
count: a state taken from here goes on with the batch that follows the last one handed out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.feed.prefetch import Prefetch
from penstock.feed.state import LoaderState
from penstock.feed.timings import Timings
from penstock.feed.torch_tensors import as_tensor
from penstock.feed.world import launched_world

Batch = dict[str, Any]
State = dict[str, Any]

_END_TIMEOUT_S = 900.0
"""How long a thread may take to end: it ends after the batch it is at, for which a window may have to be tokenised."""


class Batches(Protocol):
    """What is adapted: a `DistributedLoader`, or what stands for one."""

    @property
    def epoch(self) -> int: ...

    @property
    def step(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def reshuffle(self, epoch: int) -> None: ...

    def exclude(
        self, sample_ids: Collection[int] | np.ndarray, *, source: str | None = None, at_once: bool = False
    ) -> None: ...

    @property
    def position(self) -> LoaderState: ...

    def state_at(self, position: LoaderState) -> State: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None: ...

    def timings(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class _Staged:
    """A batch on its way, and where its loader stands once it is handed out."""

    batch: Batch
    position: LoaderState
    copied: torch.cuda.Event | None = None
    """Happens when the device has the batch; None where it was not copied on a stream of its own."""


class TorchBatches:
    """A loader's batches as tensors on a device, some of them staged ahead.

    Iterate over this one, and speak to it instead of the loader while it is in use: `state_dict`, `load_state_dict`,
    `reshuffle`, `exclude`, `epoch` and `step` are of the batches handed out here. Ending an iteration early gives what
    was staged back to the loader. Constructing does nothing but remember. Not safe for several threads.

    On CUDA a batch is copied from pinned memory on a stream of its own, while the consumer computes; handing it out
    makes the stream that is current then wait for the copy. A consumer that uses a batch on yet another stream has to
    make that one wait. The cost: up to ``ahead + 1`` batches more in the memory of the device, and as many pinned.
    """

    def __init__(
        self,
        loader: Batches,
        *,
        device: torch.device | str | int | None = None,
        pin_memory: bool | None = None,
        ahead: int = 2,
    ) -> None:
        """Remember what to adapt.

        Args:
            loader: Whose batches.
            device: Where tensors are wanted; on the CPU where not given, and nothing is copied that need not be.
            pin_memory: Whether tensors pass through pinned memory (on CUDA), or stay there (on the CPU, for a copy of
                your own). Where not given: on CUDA, and nowhere else.
            ahead: How many batches are staged, by a thread; 0 stages each when it is asked for, without one. A CUDA
                graph that is captured meanwhile needs 0, or ``capture_error_mode="thread_local"``.
        """
        if ahead < 0:
            raise ConfigError(f"ahead={ahead} cannot be: expected 0 or more batches")
        self.loader = loader
        self.device = torch.device("cpu" if device is None else device)
        self.pin_memory = self.device.type == "cuda" if pin_memory is None else pin_memory
        self.ahead = ahead
        self._timings = Timings()
        self._handed: LoaderState | None = None
        """Where the loader stands by what was handed out; None while nothing is staged, and the loader itself knows."""
        self._staging: Generator[_Staged, None, None] | None = None
        self._iterations = 0
        self._stream: torch.cuda.Stream | None = None

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where it stands to the end of the epoch. One iteration at a time: a new one ends the old."""
        self._give_back()
        self._settle_device()
        self._iterations += 1
        return self._run(self._iterations)

    def _run(self, iteration: int) -> Generator[Batch, None, None]:
        epoch = self.loader.epoch
        try:
            while self._is_current(iteration) and self.loader.epoch == epoch:
                staging = self._staging = self._staged()
                self._handed = self.loader.position
                while (item := self._next(staging)) is not None:
                    self._handed = item.position
                    yield self._hand_out(item)
                    if self._staging is not staging:
                        break  # what was staged was of the plan before, and is gone
                else:
                    self._handed = self._staging = None
                    return
        finally:
            if iteration == self._iterations:
                self._give_back()

    def _is_current(self, iteration: int) -> bool:
        if iteration != self._iterations:
            raise PenstockError("another iteration over these batches has begun: this one cannot go on; use that one")
        return True

    def _next(self, staging: Generator[_Staged, None, None]) -> _Staged | None:
        began = time.perf_counter()
        item = next(staging, None)
        if item is not None:
            self._timings.waited(time.perf_counter() - began)
            self._timings.batches += 1
        return item

    def _give_back(self) -> None:
        """Drop what is staged; the loader stands where the last batch handed out left it."""
        staging, handed = self._staging, self._handed
        self._staging = self._handed = None
        if staging is not None:
            staging.close()
        if handed is not None:
            self.loader.load_state_dict(self.loader.state_at(handed))

    def _staged(self) -> Generator[_Staged, None, None]:
        batches = iter(self.loader)
        items = (self._stage(batch) for batch in batches)
        if not self.ahead:
            try:
                yield from items
            finally:
                _close(batches)
            return
        # By count, not by bytes: what is ahead lies in the device's memory, which is planned in batches.
        prefetch = Prefetch(_closing(items, batches), budget_bytes=self.ahead, size_of=lambda _: 1)
        try:
            yield from prefetch
        finally:
            if not prefetch.close(_END_TIMEOUT_S):
                raise PenstockError(
                    f"the feed's thread did not end within {_END_TIMEOUT_S:.0f} s: its loader hangs, and where it "
                    "stands is not known; go on from a stored state in a new process"
                )

    def _stage(self, batch: Batch) -> _Staged:
        """Make tensors of a batch and, on CUDA, begin to copy them. Runs in the thread, where there is one."""
        position = self.loader.position
        if self.device.type != "cuda":
            made = {name: as_tensor(value, pin_memory=self.pin_memory) for name, value in batch.items()}
            return _Staged(made, position)
        with torch.cuda.device(self.device):
            assert self._stream is not None
            with torch.cuda.stream(self._stream):
                moved = {name: self._begin_copy(value) for name, value in batch.items()}
                copied = torch.cuda.Event()
                copied.record(self._stream)
        return _Staged(moved, position, copied)

    def _begin_copy(self, value: Any) -> Any:
        tensor = as_tensor(value, pin_memory=self.pin_memory)
        # The pinned memory may be let go at once: its allocator waits for the copy before it gives it out again.
        return tensor.to(self.device, non_blocking=self.pin_memory) if isinstance(tensor, torch.Tensor) else tensor

    def _hand_out(self, item: _Staged) -> Batch:
        if item.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(item.copied)
            for value in item.batch.values():
                if isinstance(value, torch.Tensor):
                    # Made on the other stream, used on this one: its memory is not to be given out before that is done.
                    value.record_stream(current)
            return item.batch
        if self.device.type == "cpu":
            return item.batch
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in item.batch.items()
        }

    def _settle_device(self) -> None:
        """Refuse what is not there; and know a device by its number, for in the thread another one is the current."""
        wants_cuda = self.device.type == "cuda" or self.pin_memory
        if wants_cuda and not torch.cuda.is_available():
            raise ConfigError(
                f"device={str(self.device)!r} with pin_memory={self.pin_memory} needs CUDA, and torch finds no such "
                "device: name another, and leave pin_memory away"
            )
        if self.pin_memory and self.device.type not in ("cuda", "cpu"):
            raise ConfigError(f"pin_memory=True means nothing on {self.device}: leave it away")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self.device)

    # -- where it stands -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the current epoch; as the loader's."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        return self.loader.epoch if self._handed is None else self._handed.epoch

    @property
    def step(self) -> int:
        """Batches of this epoch that were handed out."""
        return self.loader.step if self._handed is None else self._handed.step

    def state_dict(self) -> State:
        """Where it stands by the batches handed out; of the loader's kind, good for any loader of the same shape."""
        return self.loader.state_at(self.loader.position if self._handed is None else self._handed)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go to where a state stands, as the loader does; what is staged is dropped."""
        self._give_back()
        self.loader.load_state_dict(state, allow=allow)

    def reshuffle(self, epoch: int) -> None:
        """Go to the beginning of an epoch, as the loader does; where it stands in it already, nothing changes."""
        if epoch != self.epoch:
            self._give_back()
            self.loader.reshuffle(epoch)

    def exclude(
        self, sample_ids: Collection[int] | np.ndarray, *, source: str | None = None, at_once: bool = False
    ) -> None:
        """Leave samples out, as the loader does; an iteration under way goes on with what is left."""
        self._give_back()
        self.loader.exclude(sample_ids, source=source, at_once=at_once)

    def timings(self) -> dict[str, float]:
        """As the loader's; the waits are those of the consumer here."""
        own = self._timings.report()
        waits = {name: own[name] for name in ("batches", "wait_p50_s", "wait_p99_s", "wait_share")}
        return {**self.loader.timings(), **waits}


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and how many there are: torch.distributed's, else RANK and WORLD_SIZE, else alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return launched_world() or (0, 1)


def _closing(items: Iterable[_Staged], batches: Iterator[Batch]) -> Iterator[_Staged]:
    """The items; the iterator beneath ends with them, in the thread that ran it."""
    try:
        yield from items
    finally:
        _close(batches)


def _close(iterator: Iterator[Any]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()

"""Images of units on their way to the device: a thread brings them, in the order of their use, a few slots ahead.

wanted:  layer 5, 6, 7, ... ──► stepped by now? ──► a free slot? ──► copy ──► `get` by the thread that computes
                                                        ▲                          │
                                                        └───────── release ◄───────┘
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import TrainError
from penstock.train.streamed.host import HostState
from penstock.train.streamed.lanes import Lanes, Mark
from penstock.train.streamed.layout import Unit

_LOOK_AROUND_S = 1.0


@dataclass(slots=True)
class _Slot:
    flat: Tensor
    free: Mark = None
    """Behind its last use."""
    ready: Mark = None


class Loader:
    """Brings units to the device. `expect`, `get` and `release` are for one thread; `close` ends the loader's own."""

    def __init__(
        self,
        units: list[Unit],
        state: HostState,
        lanes: Lanes,
        until_stepped: Callable[[Unit], None],
        *,
        slots: int,
        size: int,
    ) -> None:
        """Make slots.

        Args:
            units: All of them.
            state: Where their images are.
            lanes: Of the device.
            until_stepped: Returns once the image of a unit is up to date.
            slots: How many units may be on the device at a time, at least 2.
            size: Numbers of the largest layer. The edge has a slot of its own, made when it is first loaded.
        """
        self._units = units
        self._state = state
        self._lanes = lanes
        self._until_stepped = until_stepped
        dtype = state.units[0].image.dtype
        self._free = deque(self._new_slot(size, dtype) for _ in range(slots))
        self._edge_free: deque[_Slot] = deque()
        self.slots = slots
        self._wanted: deque[int] = deque()
        self._loaded: dict[int, _Slot] = {}
        self._forgotten = 0
        """How often: what was on its way before is not wanted any more."""
        self._failure: BaseException | None = None
        self._closed = False
        self.waited_s = 0.0
        """How long `get` had to wait for units: for their step, most often."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def expect(self, order: Iterable[int]) -> None:
        """Units that will be asked for, in this order."""
        with self._changed:
            self._wanted.extend(order)
            self._changed.notify_all()

    def get(self, unit: int) -> Tensor:
        """A unit on the device, until it is released; the computing lane waits for it, this thread for little."""
        with self._changed:
            if unit not in self._loaded:
                began = time.perf_counter()
                while unit not in self._loaded:
                    self._refuse_if_over()
                    self._changed.wait(_LOOK_AROUND_S)
                self.waited_s += time.perf_counter() - began
            slot = self._loaded[unit]
        self._lanes.wait("compute", slot.ready)
        return slot.flat

    def release(self, unit: int) -> None:
        """What is under way with a unit is the last."""
        mark = self._lanes.mark("compute")
        with self._changed:
            self._put_back(unit, mark)
            self._changed.notify_all()

    def drop_edge(self) -> None:
        """The edge will not be loaded for now: its slot is given up."""
        with self._changed:
            self._edge_free.clear()

    def forget(self) -> None:
        """Nothing that was expected is wanted any more, and what was loaded may be out of date."""
        with self._changed:
            self._forgotten += 1
            self._wanted.clear()
            mark = self._lanes.mark("compute")
            for unit in list(self._loaded):
                self._put_back(unit, mark)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; whoever asks for a unit from now on is refused."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=60)

    def _put_back(self, unit: int, mark: Mark) -> None:
        slot = self._loaded.pop(unit)
        slot.free = mark
        (self._free if unit else self._edge_free).append(slot)

    def _new_slot(self, size: int, dtype: torch.dtype) -> _Slot:
        flat = torch.zeros(size, dtype=dtype, device=self._lanes.device)
        return _Slot(flat, free=self._lanes.mark("compute"))  # where its zeros are, and what had this memory before

    def _slot_for(self, unit: int) -> _Slot | None:
        if unit:
            return self._free.popleft() if self._free else None
        if not self._edge_free:
            image = self._state.units[0].image
            return self._new_slot(len(image), image.dtype)
        return self._edge_free.popleft()

    def _refuse_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed or not self._thread.is_alive():
            raise TrainError("weights are asked for when the trainer is closed")

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    slot = None
                    while not self._closed and slot is None:
                        slot = self._slot_for(self._wanted[0]) if self._wanted else None
                        if slot is None:
                            self._changed.wait()
                    if self._closed or slot is None:
                        return
                    index, forgotten = self._wanted.popleft(), self._forgotten
                self._until_stepped(self._units[index])
                image = self._state.units[index].image
                slot.ready = self._lanes.copy("in", slot.flat[: len(image)], image, after=slot.free)
                with self._changed:
                    self._loaded[index] = slot
                    if forgotten != self._forgotten:
                        self._put_back(index, slot.ready)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for a unit
            with self._changed:
                self._failure = error
                self._changed.notify_all()

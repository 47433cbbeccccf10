"""The ranks of one machine, which hold one copy of the weights together; several machines hold the same.

Every unit is cut into as many shares as the machine has ranks. A rank steps its share of each, once the gradients of
all ranks of the machine have arrived, added up over machines where there are several. Who has got how far stands in
memory that all of them see; whoever waits for another looks, now and then, whether it lives.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError, RankLost
from penstock.train.ranks import Ranks
from penstock.train.streamed.host import HostMemory, memory_file
from penstock.train.streamed.layout import Unit

_POLL_S = 0.0002
_LOOK_AROUND_S = 0.5
_PIECE = 1 << 22


class Sharing:
    """One rank among those it shares memory with. Alone, everything is its own and nobody is waited for."""

    def __init__(self, ranks: Ranks, num_units: int) -> None:
        """Meet the others, all at the same time.

        Args:
            ranks: All ranks of the job; those of a machine have consecutive numbers.
            num_units: How many units are stepped.
        """
        self._ranks = ranks
        self.world = ranks.world
        self.local_world = ranks.local_world
        self.local_rank = ranks.rank % self.local_world
        self.hosts = self.world // self.local_world
        self._pids: dict[int, int] = {}
        self._files: list[int] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._will = np.zeros(num_units, np.int64)
        self._taken = np.zeros(num_units, np.int64)
        self._across: Any = None
        if self.world == 1:
            self._progress = np.zeros((2, 1, num_units), np.int64)
            return
        self._require_machines_alike()
        size = 2 * self.local_world * num_units
        memory = HostMemory(8 * size, file=self.shared_file(8 * size))
        self._progress = memory.take(torch.int64, size).numpy().reshape(2, self.local_world, num_units)
        for (pid,) in self._of_my_machine(ranks.gather([os.getpid()])):
            if pid != os.getpid():
                self._pids[pid] = os.pidfd_open(pid)
        if self.hosts > 1:
            for local in range(self.local_world):
                group = dist.new_group(list(range(local, self.world, self.local_world)), backend="gloo")
                if local == self.local_rank:
                    assert isinstance(group, dist.ProcessGroup)
                    self._across = group

    def _require_machines_alike(self) -> None:
        """Machines cut units into shares alike: each needs as many ranks."""
        found = [machine for (machine,) in self._ranks.gather([self.local_world])]
        if len(set(found)) > 1 or self.world % self.local_world:
            raise ConfigError(
                f"{self.world} ranks on machines with {', '.join(map(str, sorted(set(found))))} each "
                "(LOCAL_WORLD_SIZE): streamed training needs as many ranks on every machine, consecutive ones"
            )

    # -- memory --------------------------------------------------------------------------------------------------------

    def shared_file(self, num_bytes: int) -> int | None:
        """A memory file that all ranks of this machine have open, made by the first of them; None for a rank alone."""
        if self.world == 1:
            return None
        mine = memory_file(num_bytes) if self.local_rank == 0 else -1
        return self._opened(mine)[0]

    def files_of_all(self, num_bytes: int) -> list[int | None]:
        """A memory file of each rank of this machine, in their order."""
        return [None] if self.world == 1 else list(self._opened(memory_file(num_bytes)))

    def _opened(self, mine: int) -> list[int]:
        """The files that ranks of this machine have made, opened here; -1 for a rank that made none."""
        files: list[int] = []
        for pid, file in self._of_my_machine(self._ranks.gather([os.getpid(), mine])):
            if file < 0 or pid == os.getpid():
                files.append(file)
                continue
            try:
                files.append(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                raise RankLost(
                    f"rank {self._ranks.rank} cannot open the memory of process {pid}, another rank of its machine "
                    f"({error.strerror}): start the ranks of a machine under one user, in one container"
                ) from error
        self._ranks.total([0.0])  # everybody has opened everything: now makers may end
        self._files.extend(file for file in files if file >= 0)
        return files

    def _of_my_machine(self, gathered: list[list[int]]) -> list[list[int]]:
        first = self._ranks.rank - self.local_rank
        return gathered[first : first + self.local_world]

    # -- progress ------------------------------------------------------------------------------------------------------

    def arrived(self, unit: Unit) -> None:
        """This rank's gradients of a unit are there; returns once all ranks' of the machine are."""
        self._taken[unit.index] += 1
        self._progress[0, self.local_rank, unit.index] = self._taken[unit.index]
        self._wait_for(lambda: bool((self._progress[0, :, unit.index] >= self._taken[unit.index]).all()))

    def share(self, unit: Unit) -> slice:
        """What this rank steps of a unit."""
        return unit.share(self.local_rank, self.local_world)

    def will_step(self, unit: Unit, parts: int) -> None:
        """One more step of a unit is on its way, of its share in so many parts; of all ranks' shares in as many."""
        self._will[unit.index] += parts

    def stepped(self, unit: Unit) -> None:
        """A part of this rank's share of a unit is stepped."""
        with self._changed:  # several threads step
            self._progress[1, self.local_rank, unit.index] += 1
            self._changed.notify_all()

    def until_stepped(self, unit: Unit) -> None:
        """Returns once all parts of all shares of a unit are stepped, as often as they will be so far."""
        wanted = self._will[unit.index]
        column = self._progress[1, :, unit.index]
        if self.world > 1:
            self._wait_for(lambda: bool((column >= wanted).all()))
            return
        with self._changed:
            while column[0] < wanted:
                self._raise_failure()
                self._changed.wait(_LOOK_AROUND_S)

    def fail(self, error: BaseException) -> None:
        """Nothing will be stepped any more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        deadline, look = time.monotonic() + self._ranks.timeout_s, time.monotonic() + _LOOK_AROUND_S
        while not reached():
            self._raise_failure()
            time.sleep(_POLL_S)
            if time.monotonic() > look:
                look = time.monotonic() + _LOOK_AROUND_S
                self._require_alive()
            if time.monotonic() > deadline:
                raise self._ranks.lost(
                    f"no gradients or weights from another rank of this machine for {self._ranks.timeout_s:.0f} s"
                )

    def _require_alive(self) -> None:
        looking = select.poll()  # unlike select, of files of any number
        for file in self._pids.values():
            looking.register(file, select.POLLIN)
        ended = {file for file, _ in looking.poll(0)}
        for pid, file in self._pids.items():
            if file in ended:
                raise self._ranks.lost(f"process {pid} on this machine has ended")

    # -- sums ----------------------------------------------------------------------------------------------------------

    def sum_over_hosts(self, total: Tensor) -> None:
        """Add up over machines, in their order, in place: the same bits on each."""
        if self._across is None:
            return
        for start in range(0, len(total), _PIECE):
            part = total[start : start + _PIECE]
            parts = [torch.empty_like(part) for _ in range(self.hosts)]
            self._ranks.collective(lambda: dist.all_gather(parts, part, group=self._across))  # noqa: B023 - called at once
            part.copy_(parts[0])
            for other in parts[1:]:
                part.add_(other)

    def total(self, norm_squared: float) -> float:
        """The sum over shares of a number each rank has of its own; every machine has the same shares."""
        return self._ranks.total([norm_squared])[0] / self.hosts

    def close(self) -> None:
        for file in [*self._pids.values(), *self._files]:
            with suppress(OSError):
                os.close(file)
        self._pids.clear()
        self._files.clear()

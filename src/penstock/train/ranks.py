"""The ranks of a job: one process group, and the few things its ranks do together.

Every collective ends: with a result, or within the time-out with `RankLost`. A rank that dies breaks its connections,
which the others notice at once on the CPU; one that is stopped, or dead on a GPU, is noticed by the time-out or by
whoever started the ranks. What rank 0 does for all (preparing a run, a commit, an evaluation) has no time-out: it gives
signs of life meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from penstock.errors import ConfigError, PenstockError, RankLost, TrainError
from penstock.train.summing import GradientSum
from penstock.train.trainer import State

_SIGN_OF_LIFE_S = 1.0
_WAIT_ON = -1
"""Said in place of how many bytes come: rank 0 is not done yet."""


class Ranks:
    """This process among the ranks of a job. Alone, every operation is the identity and needs no process group."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        *,
        timeout_s: float = 600.0,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Remember who this is.

        Args:
            rank: From 0.
            world: How many there are.
            timeout_s: How long a collective may take.
            on_wait: Called while rank 0 is at something and lives.
        """
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._on_wait = on_wait
        self._gradients: GradientSum | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def local_world(self) -> int:
        """How many ranks share this machine, as far as their launcher says."""
        return min(self.world, int(os.environ.get("LOCAL_WORLD_SIZE", self.world)))

    # -- what one knows ------------------------------------------------------------------------------------------------

    def from_first(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 acts, and everybody gets what came of it; its failure too, as an error on every rank.

        It may take as long as it likes, far longer than the time-out: the others wait while rank 0 lives.
        """
        if not self.is_first:
            return self._told(self._broadcast_bytes(None))
        if self.world == 1:
            return act()
        try:
            with self._signs_of_life():
                result = act()
        except BaseException as error:
            if not isinstance(error, RankLost):
                with suppress(RankLost):  # nobody is left to be told
                    self._broadcast_bytes(orjson.dumps({"failed": _in_words(error)}))
            raise
        self._broadcast_bytes(orjson.dumps({"result": result}))
        return result

    def state_from_first(self, state: State | None) -> State:
        """The state that rank 0 has, the same bits on every rank."""
        if self.world == 1:
            assert state is not None
            return state
        if state is None:
            return load(self._broadcast_bytes(None))
        with self._signs_of_life():
            data = save(state)
        self._broadcast_bytes(data)
        return state

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """While inside, rank 0 tells the others now and then that they are to wait on.

        A thread does that, by the very collective they wait in: so they notice at once when this process dies, and by
        the time-out when it is stopped. Inside, nothing else may be done together.
        """
        done, failed = threading.Event(), list[RankLost]()
        every_s = min(_SIGN_OF_LIFE_S, self.timeout_s / 4)

        def show() -> None:
            try:
                while not done.wait(every_s):
                    self.collective(lambda: dist.broadcast(torch.tensor([_WAIT_ON]), src=0))
            except RankLost as error:
                failed.append(error)

        thread = threading.Thread(target=show, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if failed:
            raise failed[0]

    @staticmethod
    def _told(data: bytes) -> dict[str, Any]:
        answer = orjson.loads(data)
        if "failed" in answer:
            raise RankLost(f"rank 0 has failed: {answer['failed']}")
        return answer["result"]

    def _broadcast_bytes(self, data: bytes | None) -> bytes:
        length = torch.tensor([len(data) if data is not None else _WAIT_ON])
        self.collective(lambda: dist.broadcast(length, src=0))
        while int(length) == _WAIT_ON:
            self._on_wait()
            self.collective(lambda: dist.broadcast(length, src=0))
        if data is not None:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            payload = torch.empty(int(length), dtype=torch.uint8)
        self.collective(lambda: dist.broadcast(payload, src=0))
        return data if data is not None else payload.numpy().tobytes()

    # -- what all know together ----------------------------------------------------------------------------------------

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.world == 1:
            return list(numbers)
        sums = torch.tensor(list(numbers), dtype=torch.float64)
        self.collective(lambda: dist.all_reduce(sums))
        return sums.tolist()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, in their order; each has as many."""
        if self.world == 1:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        self.collective(lambda: dist.all_gather(found, mine))
        return [each.tolist() for each in found]

    def expect_gradients(self, parameters: Iterable[Tensor]) -> None:
        """The backward pass that comes is the step's last on this rank: gradients are summed while it makes others.

        Not called, by a rank that has nothing to learn from or cannot tell which pass is the last, they are summed by
        `sum_gradients`; the result is the same, and others may do otherwise.
        """
        if self.world > 1:
            self._gradients = GradientSum(parameters, self._begin_sum)
            self._gradients.watch()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of all ranks, in place and in a fixed order: the same bits on every rank.

        A parameter without a gradient here counts as 0; one without a gradient anywhere is left without.
        """
        if self.world > 1:
            under_way, self._gradients = self._gradients, None
            (under_way or GradientSum(parameters, self._begin_sum)).finish()

    def _begin_sum(self, flat: Tensor) -> Callable[[], None]:
        begun: list[Any] = []
        self.collective(lambda: begun.append(dist.all_reduce(flat, async_op=True)))
        return lambda: self.collective(begun[0].wait)

    def require_equal(self, parameters: Iterable[Tensor]) -> None:
        """Refuse to go on where ranks have different weights: nothing they commit would be worth it."""
        if self.world == 1:
            return
        sums = [float(parameter.detach().sum(dtype=torch.float64)) for parameter in parameters]  # no copy of it
        mine = torch.tensor(sums, dtype=torch.float64).view(torch.int64)
        first = mine.clone()
        self.collective(lambda: dist.broadcast(first, src=0))
        differing = self.total([float(not torch.equal(mine, first))])[0]
        if differing:
            raise TrainError(
                f"{differing:.0f} of {self.world} ranks have other weights than rank 0: expected the same bits on all; "
                "nothing of this was committed. Run the same command again to go on from the last commit, and look for "
                "unequal machines or libraries if it happens again"
            )

    # -- how it fails --------------------------------------------------------------------------------------------------

    def collective(self, operation: Callable[[], Any]) -> None:
        """Do something that all ranks do at the same time; `RankLost` where that fails."""
        try:
            operation()
        except RuntimeError as error:
            raise self.lost(_first_line(error)) from error

    def lost(self, why: str) -> RankLost:
        """What to raise where others are gone."""
        return RankLost(
            f"rank {self.rank} of {self.world} has lost the others: one has ended, or was silent for "
            f"{self.timeout_s:.0f} s ({why}): see what the others say, then run the same command again to go on from "
            "the last commit"
        )


@contextmanager
def joined_ranks(
    device: torch.device, *, timeout_s: float, on_wait: Callable[[], None] = lambda: None
) -> Iterator[Ranks]:
    """Meet the other ranks where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, as torchrun sets them."""
    timeout = timedelta(seconds=timeout_s)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start ranks with torchrun, or leave that to --ddp --workers N"
        )
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"RANK={os.environ['RANK']} of WORLD_SIZE={os.environ['WORLD_SIZE']} could not meet the others within "
            f"{timeout_s:.0f} s ({_first_line(error)}): see what they say, then run the same command again"
        ) from error
    try:
        yield Ranks(rank, world, timeout_s=timeout_s, on_wait=on_wait)
    finally:
        dist.destroy_process_group()


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]

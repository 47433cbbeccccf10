"""AdamW on the host, unit by unit, in a thread of its own while the device computes.

Gradients that arrive are added up over the ranks of the machine in their order, in fp32, each rank its own share of
every unit; then weights, moments and image of that share are stepped. A unit is a few pieces that fit the processor's
cache: it is read and written once.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from penstock.train.optimizers import AdamSettings
from penstock.train.streamed.background import Background
from penstock.train.streamed.due import Due, DueStep, StepOrder
from penstock.train.streamed.host import HostGradients, HostState
from penstock.train.streamed.lanes import Mark, wait_on_host
from penstock.train.streamed.layout import Unit
from penstock.train.streamed.sharing import Sharing

_PIECE = 1 << 22
"""Numbers stepped at a time: gradients made fp32 for it may stay in the processor's cache."""
_EPSILON = 1e-8


@torch.no_grad()
def fused_adamw(
    weights: Tensor,
    gradients: Tensor,
    mean: Tensor,
    square: Tensor,
    order: StepOrder,
    adam: AdamSettings,
    *,
    decays: bool,
) -> None:
    """One step of AdamW on flat fp32 arrays, in place; gradients are scaled in place too."""
    torch._fused_adamw_(  # pyright: ignore
        [weights],
        [gradients],
        [mean],
        [square],
        [],
        [torch.full((), float(order.number), device=weights.device)],  # made there: a copy would wait for the device
        lr=order.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        weight_decay=adam.weight_decay if decays else 0.0,
        eps=_EPSILON,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.full((), 1 / order.scale, device=weights.device) if order.scale != 1 else None,
    )


class HostAdam:
    """Steps what the host holds. Given work by one thread; anybody may wait for it."""

    def __init__(
        self,
        units: list[Unit],
        state: HostState,
        gradients: list[HostGradients],
        sharing: Sharing,
        adam: AdamSettings,
    ) -> None:
        """Begin the thread.

        Args:
            units: All of them.
            state: What is stepped.
            gradients: Of every rank of this machine, in their order.
            sharing: This rank among them.
            adam: The optimizer's settings.
        """
        self._units = units
        self._state = state
        self._gradients = gradients
        self._sharing = sharing
        self._adam = adam
        self._sums: list[Tensor] = []
        if sharing.world > 1:
            self._sums = [torch.zeros(unit.size // sharing.local_world) for unit in units]
        self._scratch = torch.empty(_PIECE)
        self._norm_squared = 0.0
        self.busy_s = 0.0
        threads = threads_for(sharing.local_world)
        self._thread = Background("optimizer", begin=lambda: torch.set_num_threads(threads), on_failure=sharing.fail)

    def take(self, unit: Unit, arrived: Mark) -> None:
        """The gradients of a unit are here, once a mark is reached; all ranks give units in the same order."""
        self._thread.give(lambda: self._sum(unit, arrived))

    def help_with(self, due: Due, most: int) -> None:
        """Step what is due, after everything given before; no more parts than `most`, whose sums are made."""
        self._thread.give(lambda: self._step_some(due, most))

    def norm_squared(self) -> float:
        """Of this rank's shares of all gradients taken since last asked; waits for them."""
        self.wait()
        found, self._norm_squared = self._norm_squared, 0.0
        return found

    def wait(self) -> None:
        """Until everything given is done."""
        self._thread.wait()

    def close(self) -> None:
        self._thread.close()

    @torch.no_grad()
    def _sum(self, unit: Unit, arrived: Mark) -> None:
        wait_on_host(arrived)
        if self._sharing.world == 1:
            return
        self._sharing.arrived(unit)
        total, share = self._sums[unit.index], self._sharing.share(unit)
        for start in range(0, len(total), _PIECE):
            part = total[start : start + _PIECE]
            there = slice(share.start + start, share.start + start + len(part))
            part.copy_(self._gradients[0].units[unit.index][there])
            for other in self._gradients[1:]:
                part.add_(other.units[unit.index][there])
        self._sharing.sum_over_hosts(total)
        self._norm_squared += float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2

    def _step_some(self, due: Due, most: int) -> None:
        for _ in range(most):
            step = due.take(visiting=False)
            if step is None:
                return
            wait_on_host(step.arrived)
            self._step(step)

    @torch.no_grad()
    def _step(self, step: DueStep) -> None:
        began, unit, order = time.perf_counter(), step.unit, step.order
        host = self._state.units[unit.index]
        found = self._sums[unit.index] if self._sums else self._gradients[0].units[unit.index]
        shift = self._sharing.share(unit).start if self._sums else 0
        for segment, decays in unit.segments(step.part):
            for start in range(segment.start, segment.stop, _PIECE):
                part = slice(start, min(start + _PIECE, segment.stop))
                gradients = self._scratch[: part.stop - part.start]
                gradients.copy_(found[part.start - shift : part.stop - shift])
                fused_adamw(
                    host.weights[part], gradients, host.mean[part], host.square[part], order, self._adam, decays=decays
                )
                if host.image is not host.weights:
                    host.image[part].copy_(host.weights[part])
        self._sharing.stepped(unit)
        self.busy_s += time.perf_counter() - began


def threads_for(ranks: int) -> int:
    """Threads for the optimizer of each rank: a core is left for who commands the device."""
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores - 1 if cores > 4 else cores) // ranks)

"""The sum of gradients over ranks, bucket by bucket, while the backward pass still makes others.

    backward:   last layers ──► ... ──► first layers
    buckets:    the last parameters are summed first, each bucket as soon as all its gradients are there

Every rank sums the same buckets in the same order, whatever it has: what is not there when the backward pass is over,
or where there was none, is summed then. So the bits are those of a sum after the fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from penstock.errors import TrainError

BUCKET_ELEMENTS = 8 << 20
"""Gradients are summed so many numbers at a time: large enough for the network, small beside the model."""


class GradientSum:
    """Of one step. A parameter without a gradient here counts as 0; one without a gradient anywhere is left without."""

    def __init__(self, parameters: Iterable[Tensor], begin: Callable[[Tensor], Callable[[], None]]) -> None:
        """Remember what to sum.

        Args:
            parameters: The same on every rank, in the same order.
            begin: Begins to sum a tensor over all ranks, in place; what it returns waits for that.
        """
        self._buckets = list(buckets(parameters))[::-1]
        self._begin = begin
        self._missing = [len(bucket) for bucket in self._buckets]
        self._under_way: list[tuple[Tensor, Callable[[], None]]] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> None:
        """The backward pass that comes is the step's last: gradients may be summed as it makes them."""
        for place, bucket in enumerate(self._buckets):
            for parameter in bucket:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, place=place: self._made(place))
                self._hooks.append(hook)

    def finish(self) -> None:
        """Sum what is left, wait for all of it, and put the sums in the gradients' place."""
        for hook in self._hooks:
            hook.remove()
        while len(self._under_way) < len(self._buckets):
            self._sum_next()
        for bucket, (flat, wait) in zip(self._buckets, self._under_way, strict=True):
            wait()
            sizes = [parameter.numel() for parameter in bucket]
            *parts, found = flat.split([*sizes, len(bucket)])
            for parameter, part, has_one in zip(bucket, parts, found.tolist(), strict=True):
                parameter.grad = part.reshape(parameter.shape) if has_one else None

    def _made(self, place: int) -> None:
        """A gradient of a bucket is there."""
        if place < len(self._under_way):
            raise TrainError(
                "a gradient came when its sum over ranks had begun: this model makes some of them more than once in a "
                "backward pass (reentrant checkpointing does); train it with --parallel-independent"
            )
        self._missing[place] -= 1
        while len(self._under_way) < len(self._buckets) and self._missing[len(self._under_way)] == 0:
            self._sum_next()

    def _sum_next(self) -> None:
        bucket = self._buckets[len(self._under_way)]
        sizes = [parameter.numel() for parameter in bucket]
        flat = bucket[0].new_zeros(sum(sizes) + len(bucket))  # behind the gradients, who has one
        *parts, found = flat.split([*sizes, len(bucket)])
        for place, parameter in enumerate(bucket):
            if parameter.grad is not None:
                parts[place].copy_(parameter.grad.reshape(-1))
                found[place] = 1
                parameter.grad = None  # the sum takes its place: memory for one of them
        self._under_way.append((flat, self._begin(flat)))


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that fit one sum, in their order, of one kind each."""
    bucket: list[Tensor] = []
    held = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not alike or held + parameter.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.numel()
    if bucket:
        yield bucket

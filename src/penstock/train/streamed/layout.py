"""Units: the parameters that travel together, each laid out as one flat run of numbers.

    a unit:   | matrices, which decay ... | norms and biases, which do not ... | zeros up to a whole share |
              ^ every parameter begins at a multiple of `ALIGNMENT`

A decoder's layer is a unit; what is around the layers (embeddings, the last norm, the head) is one more, the edge. A
unit is moved by one copy, stepped by one kernel, and cut into equal shares, one for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

ALIGNMENT = 64
"""Numbers. Of any type they are a multiple of what kernels like to load at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter lies in its unit."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat array, in its shape."""
        return flat[self.start : self.end].view(self.parameter.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that travel together."""

    index: int
    """0 is the edge; a layer is its number plus 1."""
    name: str
    places: tuple[Place, ...]
    decaying: int
    """Up to here parameters decay; behind it they do not."""
    size: int

    def share(self, rank: int, world: int) -> slice:
        """The part of one rank."""
        each = self.size // world
        return slice(rank * each, (rank + 1) * each)

    def segments(self, part: slice) -> list[tuple[slice, bool]]:
        """A part, cut where decay ends; each piece with whether it decays."""
        cut = min(max(self.decaying, part.start), part.stop)
        pieces = [(slice(part.start, cut), True), (slice(cut, part.stop), False)]
        return [(piece, decays) for piece, decays in pieces if piece.stop > piece.start]


def lay_out(index: int, name: str, parameters: Iterable[tuple[str, nn.Parameter]], world: int) -> Unit:
    """Lay parameters out as a unit that `world` ranks can share."""
    ordered = sorted(parameters, key=lambda named: not _decays(named[1]))  # stable: else in the model's own order
    places: list[Place] = []
    end = decaying = 0
    for own_name, parameter in ordered:
        places.append(Place(name=own_name, parameter=parameter, start=end))
        end = _up_to(places[-1].end, ALIGNMENT)
        if _decays(parameter):
            decaying = end
    return Unit(
        index=index, name=name, places=tuple(places), decaying=decaying, size=_up_to(max(end, 1), ALIGNMENT * world)
    )


def _decays(parameter: nn.Parameter) -> bool:
    """Matrices do. What is not trained has gradients of 0, and stays what it is where nothing decays."""
    return parameter.requires_grad and parameter.ndim >= 2


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

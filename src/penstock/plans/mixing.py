"""Mixing several data sets: which of them each draw comes from, as a pure function of the draw's position.

Draws come in cycles. In every cycle each data set has its share of the draws, to within one (the one with the largest
share makes up for the others); where they stand in the cycle is shuffled. How many draws a data set has had before any
cycle follows from the weights alone, so any position is answered without counting up to it. Weights may change at given
positions: each change begins a stretch of its own. Or each data set has a given number of draws: then all of them are
used up at the same position, to the draw.

    position ──► stretch, cycle ──► (data set, how many draws it has had before) ──► its own order, epoch after epoch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.errors import ConfigError
from penstock.plans.permutation import Permutation, derive_key

PARTS = 10**9
"""Weights are rounded to this many parts, so that all arithmetic is exact."""
_LEAST_CYCLE = 256


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Draws under the same weights."""

    number: int
    start: int
    before: tuple[int, ...]
    """Draws of each data set before this stretch."""
    parts: tuple[int, ...]
    """Shares, in parts of their sum."""
    cycle: int
    end: int | None = None
    """How many draws it has in all, where that is fixed; its last cycle is a long one then, and takes the rest."""

    def _cycles(self, end: int) -> int:
        return max(1, end // self.cycle)

    def split(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The cycles that places of the stretch are in, and their slots there."""
        cycles = places // self.cycle
        if self.end is not None:
            cycles = np.minimum(cycles, self._cycles(self.end) - 1)
        return cycles, places - cycles * self.cycle

    def drawn(self, cycles: int) -> np.ndarray:
        """How many of the draws of its first cycles each data set has."""
        count = cycles * self.cycle
        if self.end is not None and cycles >= self._cycles(self.end):
            count = self.end
        total = sum(self.parts)
        drawn = np.array([count * part // total for part in self.parts], dtype=np.int64)
        # The largest share outgrows, in a cycle, what rounding can take from it: so its draws never fall either.
        drawn[self.parts.index(max(self.parts))] += count - drawn.sum()
        return drawn


class Mixture:
    """Draws from several data sets by weight. Holds no array of draws; safe for threads; pickles."""

    def __init__(
        self, weights: Sequence[float], *, seed: int = 0, schedule: Mapping[int, Sequence[float]] | None = None
    ) -> None:
        """Fix the shares.

        Args:
            weights: One a data set; only their ratios count. 0 leaves one out.
            seed: Of where draws stand in their cycles.
            schedule: Other weights from given positions on.
        """
        self._seed = seed
        self._stretches: list[_Stretch] = []
        self._table = lru_cache(maxsize=8)(self._make_table)
        for start, chosen in sorted({0: weights, **(schedule or {})}.items()):
            self._add(start, chosen, len(weights))

    @classmethod
    def of_counts(cls, counts: Sequence[int], *, seed: int = 0) -> Mixture:
        """A mixture in which each data set has just so many draws, spread over all of them alike."""
        if not counts or min(counts) < 0:
            raise ConfigError(f"draws {list(counts)} cannot be mixed: expected 0 or more of each data set")
        stretch = _Stretch(
            number=0,
            start=0,
            before=(0,) * len(counts),
            parts=tuple(counts) if sum(counts) else (1,) * len(counts),
            cycle=_cycle(len(counts)),
            end=sum(counts),
        )
        return _rebuild(seed, [stretch])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._seed, self._stretches)

    @property
    def source_count(self) -> int:
        return len(self._stretches[0].before)

    def shares(self, position: int) -> np.ndarray:
        """The share each data set is to have at a position; they add up to 1."""
        parts = np.array(self._stretch(position).parts, dtype=np.float64)
        return parts / parts.sum()

    def mean_shares(self, position: int) -> np.ndarray:
        """The share each data set was to have of all draws before a position, by the weights that held; of the first
        draw where there is none yet."""
        if not position:
            return self.shares(0)
        ends = [*(stretch.start for stretch in self._stretches[1:]), position]
        meant = np.zeros(self.source_count)
        for stretch, end in zip(self._stretches, ends, strict=True):
            meant += max(0, min(end, position) - stretch.start) * self.shares(stretch.start)
        return meant / position

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each position, which data set it draws from and how many draws that one has had before."""
        positions = np.asarray(positions, dtype=np.int64)
        if len(positions) and positions.min() < 0:
            raise ConfigError(f"position {positions.min()} does not exist: expected 0 or more")
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        starts = np.array([stretch.start for stretch in self._stretches])
        numbers = np.searchsorted(starts, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            stretch = self._stretches[number]
            mine = np.flatnonzero(numbers == number)
            cycles, slots = stretch.split(positions[mine] - stretch.start)
            for cycle in np.unique(cycles).tolist():
                chosen = cycles == cycle
                of_slot, rank = self._table(number, cycle)
                sources[mine[chosen]] = of_slot[slots[chosen]]
                draws[mine[chosen]] = rank[slots[chosen]]
        return sources, draws

    def draws_before(self, position: int) -> np.ndarray:
        """How many draws each data set has had before a position."""
        stretch = self._stretch(position)
        cycle, slot = (int(part) for part in stretch.split(np.array(position - stretch.start)))
        whole = np.array(stretch.before) + stretch.drawn(cycle)
        if slot:
            of_slot, _ = self._table(stretch.number, cycle)
            whole = whole + np.bincount(of_slot[:slot], minlength=self.source_count)
        return whole

    def _add(self, start: int, weights: Sequence[float], count: int) -> None:
        if start < 0:
            raise ConfigError(f"a change of weights at position {start} cannot be: expected 0 or more")
        if len(weights) != count:
            raise ConfigError(f"{len(weights)} weights at position {start}, expected {count}: one a data set")
        before = self.draws_before(start) if self._stretches else np.zeros(count, dtype=np.int64)
        self._stretches.append(
            _Stretch(
                number=len(self._stretches),
                start=start,
                before=tuple(before.tolist()),
                parts=tuple(_parts(weights)),
                cycle=_cycle(count),
            )
        )

    def _stretch(self, position: int) -> _Stretch:
        return next(stretch for stretch in reversed(self._stretches) if stretch.start <= position)

    def _make_table(self, number: int, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """For each slot of a cycle, its data set and how many draws that one has had before."""
        stretch = self._stretches[number]
        first = stretch.drawn(cycle)
        counts = stretch.drawn(cycle + 1) - first
        size = int(counts.sum())
        placed = Permutation(size, derive_key("mixing", self._seed, number, cycle))
        of_slot = np.repeat(np.arange(len(counts)), counts)[placed.at(np.arange(size))]
        by_source = np.argsort(of_slot, kind="stable")
        rank = np.empty(size, dtype=np.int64)
        rank[by_source] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
        return of_slot, rank + (np.array(stretch.before) + first)[of_slot]


def _parts(weights: Sequence[float]) -> list[int]:
    """Weights as whole parts that add up to PARTS, the largest remainders rounded up."""
    if not weights or any(not np.isfinite(weight) or weight < 0 for weight in weights) or not sum(weights):
        raise ConfigError(f"weights {list(weights)} cannot be shared out: expected 0 or more, and not all 0")
    exact = [weight / sum(weights) * PARTS for weight in weights]
    parts = [int(share) for share in exact]
    for index in sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])[: PARTS - sum(parts)]:
        parts[index] += 1
    for weight, part in zip(weights, parts, strict=True):
        if weight and not part:
            raise ConfigError(
                f"weight {weight} of {sum(weights)} is a share of less than {1 / PARTS}: raise it, or leave that data "
                "set out with 0"
            )
    return parts


def _cycle(count: int) -> int:
    return max(_LEAST_CYCLE, 2 * count * count)


def _rebuild(seed: int, stretches: list[_Stretch]) -> Mixture:
    mixture = Mixture([1.0] * len(stretches[0].before), seed=seed)
    mixture._stretches = stretches
    return mixture

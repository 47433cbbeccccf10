"""Scores: what a miner's contribution is worth, by what it does to the loss. Pure arithmetic.

    gain        how much of the loss a change takes away: (before - after) / before
    excess      (gain of the miner's change - gain of the window's aggregate) on the pages it was to read
                minus the same on random pages

Whoever learned its own pages does better on them than everybody's change does, and no better elsewhere: its excess is
above 0. A copied contribution, or one made of other pages, has no excess; how hard a page is cancels out. Excesses are
taken in units of what is usual in their window and remembered over windows. Who falls far below the others is out;
where pages are so alike that most miners have no excess to speak of, losses tell nothing, and nobody is out by them;
nor where fewer than three are there to compare.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

MEMORY = 0.7
"""What is left of a score a window later."""
LEAST_WINDOWS = 3
"""Nobody is out by its losses alone before it was measured so often."""
OUT_BELOW = 0.3
"""Out is who has less than this part of the median score."""
ABSENT_FROM = 2
"""Who has missed so many windows in a row is not waited for."""
TELLING = 0.5
"""Losses tell something where the median score is at least this."""
LEAST_SCORED = 3
"""Of fewer nobody can say what is usual: the median of two is their mean."""
_LARGEST = 3.0
FLAGGED = -1.0
"""What a window counts in which somebody was found cheating."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Mean losses around one contribution."""

    assigned_before: float
    assigned_after: float
    assigned_aggregate: float
    """On the assigned pages, after the window's aggregate."""
    random_before: float
    random_after: float
    random_aggregate: float

    def excess(self) -> float:
        """How much better than everybody's change it does on its own pages, less the same elsewhere."""
        own = _gained(self.assigned_aggregate - self.assigned_after, self.assigned_before)
        return own - _gained(self.random_aggregate - self.random_after, self.random_before)


def _gained(difference: float, before: float) -> float:
    """A difference of losses as a part of the loss; pages without a token to predict have none, and tell nothing."""
    return difference / before if before else 0.0


def in_units(excesses: Mapping[str, float]) -> dict[str, float]:
    """Excesses of a window by what is usual in it: 1 is as large as the median, whatever its sign."""
    finite = {uid: each if math.isfinite(each) else -math.inf for uid, each in excesses.items()}
    sizes = [abs(each) for each in finite.values() if math.isfinite(each)]
    unit = max(statistics.median(sizes), 1e-12) if sizes else 1.0
    return {uid: max(-_LARGEST, min(_LARGEST, each / unit)) for uid, each in finite.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What is remembered of a miner."""

    score: float = 0.0
    windows: int = 0
    """How often it was measured."""
    is_out: bool = False
    flags: tuple[str, ...] = ()
    """What was found in the last window it was measured in."""
    absent: int = 0
    """Windows in a row, up to the last, in which nothing usable came."""

    def missed(self) -> Score:
        """With a window in which nothing came."""
        return replace(self, absent=self.absent + 1)

    def after(self, excess: float, flags: tuple[str, ...] = ()) -> Score:
        """With another window."""
        value = FLAGGED if flags else excess
        memory = min(MEMORY, self.windows / (self.windows + 1))  # the mean, until there is more than memory holds
        return Score(
            score=memory * self.score + (1 - memory) * value,
            windows=self.windows + 1,
            is_out=self.is_out,
            flags=flags,
        )


def after_window(
    scores: Mapping[str, Score],
    members: Iterable[str],
    found: Mapping[str, tuple[float, tuple[str, ...]]],
    without: Iterable[str],
    *,
    taken: Collection[str] = (),
    is_kept: bool = True,
) -> dict[str, Score]:
    """Scores of the members after a window, by what was found of each: excess and flags.

    `without` names those who were waited for, or heard, and nothing usable came. A newcomer has no score before that:
    a window that closed before it was admitted, or before it could have come, is no absence. Nor is one that has
    `taken` what somebody sent, found or not; where not all `is_kept` that was sent, nobody can say of the others."""
    waited_for = set(without)
    after: dict[str, Score] = {}
    for uid in members:
        if uid in found:
            excess, flags = found[uid]
            after[uid] = scores.get(uid, Score()).after(excess, flags)
        elif uid in taken or (uid not in waited_for and not is_kept):
            if uid in scores:
                after[uid] = replace(scores[uid], absent=0) if uid in taken else scores[uid]
        elif uid in scores or uid in waited_for:
            after[uid] = scores.get(uid, Score()).missed()
    return after


def judge(scores: Mapping[str, Score], num_scored: int | None = None) -> dict[str, Score]:
    """Say who is out: by a flag at once, else by a score far below the median of those that were measured often.

    Args:
        scores: What is remembered.
        num_scored: How many were measured in the last window; None: enough.
    """
    known = [each.score for each in scores.values() if each.windows >= LEAST_WINDOWS and not each.flags]
    median = statistics.median(known) if known else 0.0
    least = len(known) if num_scored is None else min(len(known), num_scored)
    bar = OUT_BELOW * median if median >= TELLING and least >= LEAST_SCORED else -math.inf
    return {
        uid: replace(each, is_out=bool(each.flags) or (each.windows >= LEAST_WINDOWS and each.score < bar))
        for uid, each in scores.items()
    }


@dataclass(frozen=True, slots=True)
class PeerList:
    """Who is expected in a window, and who fills in, each the best first."""

    peers: tuple[str, ...]
    reserves: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.peers + self.reserves


def choose_peers(members: Iterable[str], scores: Mapping[str, Score], seats: int) -> PeerList:
    """Peers and reserves among the members: known ones by score, then new ones as they were admitted. Who is out is
    neither; who was not there for a while is waited for no longer, but may fill in, and so come back."""
    order = list(members)
    allowed = [uid for uid in order if not (uid in scores and scores[uid].is_out)]
    ranked = sorted((uid for uid in allowed if uid in scores), key=lambda uid: -scores[uid].score)
    ranked += [uid for uid in allowed if uid not in scores]
    there = [uid for uid in ranked if uid not in scores or scores[uid].absent < ABSENT_FROM]
    gone = [uid for uid in ranked if uid not in there]
    return PeerList(tuple(there[:seats]), tuple(there[seats:] + gone))


def as_dict(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    return {uid: asdict(each) for uid, each in scores.items()}


def from_dict(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Score]:
    """Scores as they were posted; a TypeError, KeyError, ValueError or AttributeError where they are none."""
    return {
        str(uid): Score(
            score=float(each["score"]),
            windows=int(each["windows"]),
            is_out=bool(each["is_out"]),
            flags=tuple(str(flag) for flag in each["flags"]),
            absent=int(each["absent"]),
        )
        for uid, each in told.items()
    }

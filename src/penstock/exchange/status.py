"""Where a run stands, by what its aggregator bucket holds: windows, contributors, rejections, bytes, scores.

Reads only, and knows nothing of torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.errors import ExchangeError, ObjectNotFound
from penstock.exchange.keys import Keys
from penstock.exchange.manifests import Manifest, ManifestChain
from penstock.exchange.members import read_members
from penstock.exchange.places import Places
from penstock.exchange.scoring import Score, choose_peers, from_dict
from penstock.exchange.settings import RunFacts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run, as far as it was looked at."""

    facts: RunFacts
    members: tuple[str, ...]
    closed: int
    """Windows closed in all."""
    windows: list[Manifest]
    """The last ones."""
    scores: dict[str, Score]
    scores_window: int | None
    url: str

    def as_dict(self) -> dict[str, Any]:
        settings = self.facts.settings
        peers = choose_peers(self.members, self.scores, settings.seats)
        dense = 4 * self.facts.num_weights
        sent = sum(each.size_bytes for window in self.windows for each in window.contributions)
        count = sum(len(window.contributions) for window in self.windows)
        return {
            "run": settings.run,
            "where": self.url,
            "num_weights": self.facts.num_weights,
            "codec": settings.codec,
            "windows_closed": self.closed,
            "members": [self._member(uid, peers.peers, peers.reserves) for uid in self.members],
            "scores_window": self.scores_window,
            "bytes": {
                "contributions": sent,
                "dense": dense * count,
                "ratio": round(dense * count / sent, 2) if sent else None,
                "aggregates": sum(window.aggregate["size_bytes"] for window in self.windows),
            },
            "rejections": dict(Counter(each.reason for window in self.windows for each in window.rejected)),
            "windows": [_window(window, dense) for window in self.windows],
        }

    def _member(self, uid: str, peers: tuple[str, ...], reserves: tuple[str, ...]) -> dict[str, Any]:
        score = self.scores.get(uid)
        taken = sum(any(each.uid == uid for each in window.contributions) for window in self.windows)
        rejected = Counter(each.reason for window in self.windows for each in window.rejected if each.uid == uid)
        return {
            "uid": uid,
            "standing": "peer" if uid in peers else "reserve" if uid in reserves else "out",
            "score": round(score.score, 4) if score is not None else None,
            "flags": list(score.flags) if score is not None else [],
            "contributions": taken,
            "missing": sum(uid in window.missing for window in self.windows),
            "rejected": dict(rejected),
        }


def read_status(places: Places, run: str, *, last: int = 50) -> RunStatus:
    """Look at a run and its last windows."""
    keys = Keys(run)
    storage = places.aggregator
    try:
        facts = RunFacts.from_bytes(storage.get(keys.settings), keys.settings)
    except ObjectNotFound:
        raise ExchangeError(f"{storage.url} holds no run {run!r}: name one that an aggregator has begun") from None
    chain = ManifestChain(storage, keys)
    closed = chain.count()
    scores: dict[str, Score] = {}
    scores_window = None
    with suppress(ObjectNotFound):  # nothing was scored yet
        scores, scores_window = _read_scores(storage.get(keys.scores(facts.settings.validator)))
    return RunStatus(
        facts=facts,
        members=read_members(storage, keys),
        closed=closed,
        windows=list(_last_windows(chain, closed, last)),
        scores=scores,
        scores_window=scores_window,
        url=storage.url,
    )


def _read_scores(data: bytes) -> tuple[dict[str, Score], int | None]:
    try:
        told = orjson.loads(data)
        return from_dict(told["scores"]), int(told["window"])
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        _log.warning("the validator's scores cannot be read, so none are shown: %s", error)
        return {}, None


def _last_windows(chain: ManifestChain, closed: int, last: int) -> Iterator[Manifest]:
    for window in range(max(0, closed - last), closed):
        manifest = chain.read(window)
        if manifest is not None:
            yield manifest


def _window(window: Manifest, dense: int) -> dict[str, Any]:
    return {
        "window": window.window,
        "contributors": [each.uid for each in window.contributions],
        "reserves": [each.uid for each in window.contributions if each.is_reserve],
        "rejected": [
            {"uid": each.uid, "window": each.window, "reason": each.reason, "told": each.told}
            for each in window.rejected
        ],
        "missing": list(window.missing),
        "bytes": sum(each.size_bytes for each in window.contributions),
        "dense_bytes": dense * len(window.contributions),
        "aggregate_bytes": window.aggregate["size_bytes"],
        "seconds": round(window.closed_at - window.opened_at, 3),
        "extensions": window.extensions,
        "weights": window.weights,
    }

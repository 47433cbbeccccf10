"""The aggregator: opens windows, gathers, closes them. What it puts where there was nothing is what everybody learns.

    heads of contributions ── all seats taken, or time over by the store's clock ──► checked, added up in order
        ──► aggregate (named by its digest) ──► manifest, put only where there is none ──► its own replica's step
        ──► a checkpoint every K windows ──► what nobody needs any more is removed

It holds nothing that the store does not hold: killed at any time, or started twice, it reads where the chain ends and
goes on; of two manifests for a window the second is refused by the store.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ArtifactRejected, ObjectNotFound
from penstock.exchange.artifacts import pack
from penstock.exchange.checkpoints import Checkpoint
from penstock.exchange.clock import StoreClock, compare_clocks
from penstock.exchange.gathering import GATHER_BYTES, Gathering
from penstock.exchange.journal import Journal
from penstock.exchange.keys import VERSION
from penstock.exchange.layout import digest_of
from penstock.exchange.manifests import Accepted, Manifest, Rejected
from penstock.exchange.members import read_members
from penstock.exchange.opening import OpenedRun
from penstock.exchange.places import needed, read_limited, store_time
from penstock.exchange.receiving import OpenWindow, Received, Receiver
from penstock.exchange.replica import Replica
from penstock.exchange.retention import Retention
from penstock.exchange.scoring import PeerList, choose_peers, from_dict
from penstock.exchange.work_folder import hold
from penstock.faults import reach
from penstock.train.stopping import StopRequest

_log = logging.getLogger(__name__)
_NORM_WINDOWS = 5
_LOOKED_BACK = 3
"""Windows that are looked at again, for what came late."""
_SCORES_BYTES = 4 << 20


@dataclass(slots=True)
class _Closing:
    """A window about to be closed."""

    gathering: Gathering
    peers: PeerList
    members: tuple[str, ...]
    scores_window: int | None
    chosen: list[Received]
    extensions: int = 0


class Aggregator:
    """Closes window after window until it is asked to stop."""

    def __init__(
        self,
        opened: OpenedRun,
        *,
        stop: StopRequest,
        work: Path | None = None,
        poll_s: float = 1.0,
        gather_bytes: int = GATHER_BYTES,
        until_window: int | None = None,
    ) -> None:
        self._run = opened
        self._stop = stop
        self._poll_s = poll_s
        self._gather_bytes = gather_bytes
        self._until = until_window
        self._folder = work
        self._journal = Journal(work, "aggregator")
        self._storage = opened.places.aggregator
        self._receiver = Receiver(needed(opened.places.gradients), opened.keys, opened.codec)
        self._clock = StoreClock(self._storage, opened.keys.clock)
        self._retention = Retention(opened)
        self._heard: set[tuple[str, int]] = set()
        """Whose contribution to which window came in time, or was told to be late."""

    def run(self) -> int:
        """Close windows; returns how many are closed."""
        with hold(self._folder, "aggregator", self._run.settings.run):
            return self._close_windows()

    def _close_windows(self) -> int:
        replica = self._run.replica()
        replica.catch_up()
        self._checkpoint(replica)
        self._retention.catch_up(replica.learned, read_members(self._storage, self._run.keys))
        compare_clocks(self._clock, StoreClock(needed(self._run.places.gradients), self._run.keys.clock))
        self._journal.note("started", window=replica.learned)
        while not self._stop.requested() and (self._until is None or replica.learned < self._until):
            self._window(replica)
        self._journal.note("stopped", window=replica.learned)
        return replica.learned

    def _window(self, replica: Replica) -> None:
        closing = self._gather(replica)
        if closing is None:
            return
        try:
            began = time.perf_counter()
            total, folded = closing.gathering.fold(closing.chosen, self._run.codec)
            if len(folded) < self._run.settings.min_contributions:
                return  # some were taken away while they were read: the window stays open
            change = self._run.codec.finish(total, self._run.settings.outer_learning_rate / len(folded))
            manifest, data = self._described(replica, closing, folded, change)
            reach("exchange.before_publish", manifest.aggregate["key"])
            published = self._run.chain.publish(self._storage, manifest)
            reach("exchange.after_publish", self._run.keys.manifest(manifest.window))
            replica.apply(published, data if published.aggregate == manifest.aggregate else None)
            if published != manifest:
                _log.warning("window %d was closed by another aggregator: following it", manifest.window)
            self._checkpoint(replica)
            self._retention.after(published, closing.members)
            self._note(published, time.perf_counter() - began)
        finally:
            closing.gathering.close()

    def _gather(self, replica: Replica) -> _Closing | None:
        """Wait until a window can be closed; None where it was closed by another, or it is time to stop."""
        run, settings = self._run, self._run.settings
        window = replica.learned
        opened_at = self._opened_at(window)
        members = read_members(self._storage, run.keys)
        peers, scores_window = self._peers(members)
        closes_at = opened_at + settings.window_s + settings.grace_s
        gathering = Gathering(
            self._receiver,
            OpenWindow(window=window, base=replica.base, opened_at=opened_at, closes_at=closes_at),
            budget_bytes=self._gather_bytes,
            usual_norms=self._usual_norms(window),
            norm_factor=settings.norm_factor,
            max_norm=settings.max_norm,
        )
        closing = _Closing(gathering, peers, members, scores_window, [])
        while not self._stop.requested():
            is_over = self._clock.now() > closes_at  # asked before looking: what comes in time is looked at
            gathering.look(peers.all, closes_at)
            if is_over or self._is_full(gathering, peers):
                closing.chosen = gathering.choose(peers.all, len(peers.peers))
                is_full = self._is_full(gathering, peers)  # no longer, where a norm gave a reserve the seat
                if len(closing.chosen) >= settings.min_contributions and (is_over or is_full):
                    return closing
            if is_over:
                gathering.tell_open(peers.peers)
                closing.extensions += 1
                closes_at += settings.window_s
                members = closing.members = read_members(self._storage, run.keys)  # whoever came may be what is missing
                peers, closing.scores_window = self._peers(members)
                closing.peers = peers
            if run.chain.exists(window):
                gathering.close()
                replica.follow()
                self._checkpoint(replica)
                return None
            self._stop.wait(self._poll_s)
        gathering.close()
        return None

    @staticmethod
    def _is_full(gathering: Gathering, peers: PeerList) -> bool:
        """Whether nothing more can come that would be taken: nobody is waited for then."""
        settled = gathering.received.keys() | gathering.rejected.keys()
        if not peers.peers or not settled >= set(peers.peers):
            return False
        sound = gathering.received.keys() - gathering.rejected.keys()
        return len(sound) >= len(peers.peers) or settled >= set(peers.all)

    def _described(
        self, replica: Replica, closing: _Closing, folded: list[Received], change: Any
    ) -> tuple[Manifest, bytes]:
        """Write the aggregate, and make the manifest that names it."""
        window = replica.learned
        tensors = self._run.aggregate_codec.encode(change)
        header = {"kind": "aggregate", "version": VERSION, "run": self._run.settings.run, "window": window}
        digest, data = pack(header, tensors)
        key = self._run.keys.aggregate(window, digest)
        self._storage.put(key, data)
        weights = replica.weights.clone()
        self._run.aggregate_codec.apply(weights, tensors)
        gathering = closing.gathering
        gathering.reject_late()
        self._heard |= {(uid, window) for uid in gathering.received}
        taken = {each.uid for each in folded}
        missing = [uid for uid in closing.peers.peers if uid not in taken and uid not in gathering.rejected]
        rejected = [*gathering.rejected.values(), *self._out_of_time(gathering, closing.members)]
        manifest = Manifest(
            run=self._run.settings.run,
            window=window,
            base=replica.base,
            contributions=tuple(_accepted(each, closing.peers) for each in folded),
            rejected=tuple(sorted(rejected, key=lambda each: (each.uid, each.window))),
            missing=tuple(missing),
            aggregate={"key": key, "size_bytes": len(data), "digest": digest},
            weights=digest_of(weights),
            opened_at=gathering.expected.opened_at,
            closed_at=self._clock.now(),
            extensions=closing.extensions,
            scores_window=closing.scores_window,
        )
        return manifest, data

    def _out_of_time(self, gathering: Gathering, members: tuple[str, ...]) -> list[Rejected]:
        """What came for the last windows, too late to be seen there, and what is there for the next one already."""
        window = gathering.expected.window
        found: list[Rejected] = []
        for number in range(max(0, window - _LOOKED_BACK), window):
            found += self._late(number, gathering, members)
        for uid in gathering.heads(members, window + 1):
            told = "written before its window opened"
            found.append(Rejected(uid=uid, window=window + 1, reason="early", told=told))
        return found

    def _late(self, window: int, gathering: Gathering, members: tuple[str, ...]) -> list[Rejected]:
        """Contributions to a window that was closed without them, each told once."""
        manifest = self._run.chain.read(window)
        if manifest is None:
            return []
        seen = {each.uid for each in manifest.contributions}
        seen |= {each.uid for each in manifest.rejected if each.window == window}
        seen |= {uid for uid, number in self._heard if number == window}
        found = []
        for uid, info in gathering.heads([uid for uid in members if uid not in seen], window).items():
            if store_time(info) > manifest.closed_at:
                self._heard.add((uid, window))
                told = f"written {store_time(info) - manifest.closed_at:.0f} s after its window had closed"
                found.append(Rejected(uid=uid, window=window, reason="late", told=told))
        self._heard = {each for each in self._heard if each[1] >= window - _LOOKED_BACK}
        return found

    def _opened_at(self, window: int) -> float:
        if window:
            return self._run.chain.written_at(window - 1)
        return store_time(self._storage.head(self._run.keys.settings))

    def _peers(self, members: tuple[str, ...]) -> tuple[PeerList, int | None]:
        """Who is expected, by the validator's last word; without one, by the order of admission."""
        settings = self._run.settings
        key = self._run.keys.scores(settings.validator)
        try:
            told = orjson.loads(read_limited(self._storage, key, _SCORES_BYTES))
            scores = from_dict(told["scores"])
            window = int(told["window"])
        except ObjectNotFound:
            return choose_peers(members, {}, settings.seats), None
        except (ArtifactRejected, orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
            _log.warning("%s cannot be used, members are taken in their order: %s", key, error)
            return choose_peers(members, {}, settings.seats), None
        return choose_peers(members, scores, settings.seats), window

    def _usual_norms(self, window: int) -> list[float]:
        norms: list[float] = []
        for number in range(max(0, window - _NORM_WINDOWS), window):
            manifest = self._run.chain.read(number)
            norms += [each.norm for each in manifest.contributions] if manifest is not None else []
        return norms

    def _checkpoint(self, replica: Replica) -> None:
        if replica.learned % self._run.settings.checkpoint_every:
            return
        storage = needed(self._run.places.checkpoints)
        made = Checkpoint(learned=replica.learned, base=replica.base, weights=replica.weights)
        if self._run.checkpoints.write(storage, made):
            self._journal.note("checkpoint", window=replica.learned)
            self._retention.after_checkpoint()

    def _note(self, manifest: Manifest, close_s: float) -> None:
        self._journal.note(
            "window",
            window=manifest.window,
            contributors=[each.uid for each in manifest.contributions],
            rejected=[[each.uid, each.window, each.reason] for each in manifest.rejected],
            missing=list(manifest.missing),
            received_bytes=sum(each.size_bytes for each in manifest.contributions),
            dense_bytes=4 * self._run.facts.num_weights * len(manifest.contributions),
            aggregate_bytes=manifest.aggregate["size_bytes"],
            weights=manifest.weights,
            window_s=round(manifest.closed_at - manifest.opened_at, 3),
            close_s=round(close_s, 6),
        )


def _accepted(received: Received, peers: PeerList) -> Accepted:
    return Accepted(
        uid=received.uid,
        digest=received.artifact.digest,
        object_version=received.info.version,
        size_bytes=received.info.size_bytes,
        norm=received.norm,
        samples_digest=received.samples_digest,
        written_at=received.written_at,
        is_reserve=received.uid in peers.reserves,
    )

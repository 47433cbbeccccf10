"""The validator: works out what each miner had to read, measures what its contribution does to the loss, says so.

manifest of a window ──► weights before and after ──► each member's contribution, checked as the aggregator does
    ──► digest of sample ids, by the index alone ── the same content twice? ── losses on assigned and random pages
    ──► scores, remembered over windows ──► scores/<name>/<window>.json, latest.json: the peer list follows from it
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from penstock.errors import ArtifactRejected, ExchangeError, ObjectNotFound
from penstock.exchange.artifacts import raw
from penstock.exchange.data import WindowBatches, WindowData
from penstock.exchange.journal import Journal
from penstock.exchange.keys import VERSION
from penstock.exchange.learning import LocalLearner
from penstock.exchange.manifests import Manifest
from penstock.exchange.members import read_members
from penstock.exchange.opening import OpenedRun
from penstock.exchange.places import needed
from penstock.exchange.receiving import OpenWindow, Received, Receiver
from penstock.exchange.replica import Replica
from penstock.exchange.scoring import Losses, Score, after_window, as_dict, choose_peers, from_dict, in_units, judge
from penstock.exchange.work_folder import hold
from penstock.faults import reach
from penstock.train.devices import device_named
from penstock.train.stopping import StopRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Measured:
    """One contribution, measured."""

    losses: Losses
    content: str
    """Digest of its tensors alone: copies have the same."""
    flags: tuple[str, ...]


class Validator:
    """Scores window after window until it is asked to stop. One that falls behind leaves windows out."""

    def __init__(
        self,
        opened: OpenedRun,
        *,
        stop: StopRequest,
        work: Path | None = None,
        device: str = "cpu",
        poll_s: float = 1.0,
        until_window: int | None = None,
    ) -> None:
        self._run = opened
        self._name = opened.settings.validator
        self._stop = stop
        self._device = device_named(device)
        self._poll_s = poll_s
        self._until = until_window
        self._folder = work
        self._journal = Journal(work, f"validator {self._name}")
        self._storage = opened.places.aggregator
        self._receiver = Receiver(needed(opened.places.gradients), opened.keys, opened.codec)
        self._secret = secrets.token_hex(16)
        self._scores: dict[str, Score] = {}
        self._scored = -1
        """The last window that was scored."""
        self._left_out: list[int] = []
        """Windows since then that were closed too long ago."""
        self._has_kept_up = False
        """Whether this process was ever as far as the run is; what was closed before that is no fault of its own."""

    def run(self) -> int:
        """Follow the run and score it; returns how many windows were seen."""
        with hold(self._folder, f"validator {self._name}", self._run.settings.run):
            return self._follow()

    def _follow(self) -> int:
        self._recall()
        data = self._run.data()
        model, vector = self._run.model()
        learner = LocalLearner(model, vector, self._run.settings, self._device)
        replica = self._run.replica()
        replica.begin_at(self._run.checkpoints.newest())
        self._journal.note("started", window=replica.learned)
        try:
            while not self._stop.requested() and (self._until is None or replica.learned < self._until):
                before = replica.weights.clone()
                window = replica.learned
                manifest = replica.follow()
                if manifest is not None and replica.learned == window + 1 and self._is_due(window):
                    self._tell_left_out()
                    self._score(manifest, before, replica, learner, data)
                    continue
                self._left_out += range(max(window, self._scored + 1), replica.learned)
                if manifest is None:
                    self._tell_left_out()
                    self._stop.wait(self._poll_s)
            self._tell_left_out()
            self._journal.note("stopped", window=replica.learned)
            return replica.learned
        finally:
            data.close()

    def _is_due(self, window: int) -> bool:
        """Whether a window is worth the while: its contributions are still there, and it is not long over."""
        keep = self._run.settings.keep_contributions
        return window > self._scored and not self._run.chain.exists(window + keep - 1)

    def _tell_left_out(self) -> None:
        """One line for all windows that were passed over since the last that was scored."""
        if self._left_out and self._has_kept_up:
            first, last, count = self._left_out[0], self._left_out[-1], len(self._left_out)
            which = f"window {first} was" if count == 1 else f"windows {first} to {last} ({count}) were"
            _log.warning(
                "%s left out: windows are closed faster than this validator scores them: %s", which, self._faster
            )
        self._left_out.clear()
        self._has_kept_up = True

    @property
    def _faster(self) -> str:
        settings = self._run.settings
        return (
            f"give it a faster machine, or begin a run with fewer pages to score (n_pages={settings.n_pages}, "
            f"random_pages={settings.random_pages}), longer windows (window_s={settings.window_s:g}) or a larger "
            f"keep_contributions={settings.keep_contributions}"
        )

    def _score(
        self, manifest: Manifest, before: Tensor, replica: Replica, learner: LocalLearner, data: WindowData
    ) -> None:
        began = time.perf_counter()
        members = read_members(self._storage, self._run.keys)
        common = data.random(self._secret, manifest.window)
        random_before = learner.mean_loss(before, common.batches)
        random_aggregate = learner.mean_loss(replica.weights, common.batches)
        measured: dict[str, _Measured] = {}
        found: dict[str, tuple[float, tuple[str, ...]]] = {}
        taken = {each.uid for each in manifest.contributions}
        for uid in members:
            if self._stop.requested():
                return
            try:
                received = self._received(uid, manifest, uid in taken)
            except ArtifactRejected as error:
                _log.info("window %d, %s: %s", manifest.window, uid, error)
                if uid in taken and error.reason != "unreadable":
                    found[uid] = 0.0, ("changed",)  # it was sound when it was taken
                continue
            if received is None:
                continue
            losses = self._losses(received, before, replica.weights, learner, data, common, manifest.window)
            flags = self._flags(received, manifest, data)
            measured[uid] = _Measured(
                Losses(**losses, random_before=random_before, random_aggregate=random_aggregate),
                _content(received),
                flags,
            )
        units = in_units({uid: each.losses.excess() for uid, each in measured.items()})
        found |= {uid: (units[uid], each.flags + _copied(uid, measured)) for uid, each in measured.items()}
        rejected = [each.uid for each in manifest.rejected if each.window == manifest.window]
        is_kept = self._tell_gone(manifest, [uid for uid in members if uid in taken and uid not in found])
        without = [*manifest.missing, *rejected]
        scores = after_window(self._scores, members, found, without, taken=taken, is_kept=is_kept)
        self._scores = judge(scores, len(measured))
        self._scored = manifest.window
        self._post(manifest, members, measured)
        self._journal.note(
            "scored",
            window=manifest.window,
            scores={uid: round(each.score, 4) for uid, each in self._scores.items()},
            out=[uid for uid, each in self._scores.items() if each.is_out],
            flags={uid: list(each.flags) for uid, each in self._scores.items() if each.flags},
            loss=round(random_aggregate, 6),
            score_s=round(time.perf_counter() - began, 6),
        )

    def _tell_gone(self, manifest: Manifest, gone: list[str]) -> bool:
        """Say of whom something was taken that cannot be read any more; returns whether all is kept that was sent."""
        is_kept = not self._run.chain.exists(manifest.window + self._run.settings.keep_contributions)
        if gone and is_kept:
            told = "window %d: what %s sent was taken, and is gone before its time: it is not scored"
            _log.warning(told, manifest.window, ", ".join(gone))
        elif gone:
            told = "window %d: what %s sent was removed before it could be scored: %s"
            _log.warning(told, manifest.window, ", ".join(gone), self._faster)
        return is_kept

    def _received(self, uid: str, manifest: Manifest, was_taken: bool) -> Received | None:
        """A member's contribution, whether or not it was taken; None where there is none that could have been."""
        settings = self._run.settings
        if any((each.uid, each.window) == (uid, manifest.window) for each in manifest.rejected):
            return None
        closes_at = manifest.opened_at + (manifest.extensions + 1) * settings.window_s + settings.grace_s
        expected = OpenWindow(
            window=manifest.window,
            base=manifest.base,
            opened_at=manifest.opened_at,
            closes_at=math.inf if was_taken else closes_at,  # sent twice, it is the same still
        )
        return self._receiver.receive(uid, expected)

    def _losses(
        self,
        received: Received,
        before: Tensor,
        after: Tensor,
        learner: LocalLearner,
        data: WindowData,
        common: WindowBatches,
        window: int,
    ) -> dict[str, float]:
        """Losses on the pages that a miner had to read, and on the common ones, as if it had been alone."""
        codec = self._run.codec
        total = codec.new_total()
        codec.fold(total, received.artifact.tensors)
        alone = before - codec.finish(total, self._run.settings.outer_learning_rate)
        assigned = data.assigned(received.uid, window)
        return {
            "assigned_before": learner.mean_loss(before, assigned.batches),
            "assigned_after": learner.mean_loss(alone, assigned.batches),
            "assigned_aggregate": learner.mean_loss(after, assigned.batches),
            "random_after": learner.mean_loss(alone, common.batches),
        }

    def _flags(self, received: Received, manifest: Manifest, data: WindowData) -> tuple[str, ...]:
        flags = []
        if received.samples_digest != data.expected_digest(received.uid, manifest.window):
            flags.append("samples")  # it says itself that it read others than it had to
        taken = {each.uid: each.digest for each in manifest.contributions}
        if taken.get(received.uid, received.artifact.digest) != received.artifact.digest:
            flags.append("changed")  # another lies there now than the one that was taken
        return tuple(flags)

    def _post(self, manifest: Manifest, members: tuple[str, ...], measured: dict[str, _Measured]) -> None:
        peers = choose_peers(members, self._scores, self._run.settings.seats)
        told = orjson.dumps(
            {
                "version": VERSION,
                "run": self._run.settings.run,
                "validator": self._name,
                "window": manifest.window,
                "manifest": manifest.digest,
                "scores": as_dict(self._scores),
                "losses": {uid: asdict(each.losses) for uid, each in measured.items()},
                "peers": peers.peers,
                "reserves": peers.reserves,
            },
            option=orjson.OPT_SORT_KEYS,
        )
        reach("exchange.before_scores", str(manifest.window))
        self._storage.put(self._run.keys.scores(self._name, manifest.window), told)
        self._storage.put(self._run.keys.scores(self._name), told)

    def _recall(self) -> None:
        """Go on with the scores that were posted last."""
        key = self._run.keys.scores(self._name)
        try:
            data = self._storage.get(key)
        except ObjectNotFound:
            return
        try:
            told: dict[str, Any] = orjson.loads(data)
            self._scores, self._scored = from_dict(told["scores"]), int(told["window"])
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ExchangeError(f"{key} is damaged: {error}: remove it to begin scoring anew") from error


def _content(received: Received) -> str:
    told = hashlib.sha256()
    for _, array in sorted(received.artifact.tensors.items()):
        told.update(raw(array))
    return told.hexdigest()


def _copied(uid: str, measured: dict[str, _Measured]) -> tuple[str, ...]:
    """Of those with the same content all but one have copied: it is the one's own to whose pages it does most."""
    mine = measured[uid]
    same = [other for other, each in measured.items() if each.content == mine.content]
    return () if uid == max(same, key=lambda other: measured[other].losses.excess()) else ("copied",)

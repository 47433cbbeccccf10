"""Retention: a newcomer needs a checkpoint and every aggregate behind it; a validator, the last contributions."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from penstock.exchange.keys import window_in
from penstock.exchange.manifests import Manifest
from penstock.exchange.opening import OpenedRun
from penstock.exchange.places import needed

_REQUESTS = 8
_LOOKED_BACK = 32
"""Windows whose contributions are removed again when an aggregator starts: it may have died before it did so."""


class Retention:
    """Removes what nobody needs any more. Only the aggregator does; removing twice does no harm."""

    def __init__(self, opened: OpenedRun) -> None:
        self._run = opened
        self._settings = opened.settings
        self._aggregator = opened.places.aggregator
        self._checkpoints = needed(opened.places.checkpoints)
        self._gradients = needed(opened.places.gradients)

    def after(self, manifest: Manifest, members: Iterable[str]) -> None:
        """A window was closed."""
        self._remove_contributions(manifest.window - self._settings.keep_contributions, members)
        old = manifest.window - self._settings.keep_manifests
        if old >= 0:
            self._aggregator.delete(self._run.keys.manifest(old))
            self._aggregator.delete(self._run.keys.scores(self._settings.validator, old))

    def after_checkpoint(self) -> None:
        """A checkpoint was written: old ones go, and the aggregates before the oldest that is kept."""
        numbers = self._run.checkpoints.numbers()
        kept = numbers[-self._settings.keep_checkpoints :]
        for learned in numbers[: -self._settings.keep_checkpoints]:
            self._run.checkpoints.remove(self._checkpoints, learned)
        prefix = self._run.keys.aggregates_of(0).removesuffix("00000000-")
        for info in list(self._aggregator.list(prefix)):
            window = window_in(info.key.removeprefix(prefix).partition("-")[0])
            if kept and window is not None and window < kept[0]:
                self._aggregator.delete(info.key)

    def catch_up(self, learned: int, members: Iterable[str]) -> None:
        """What the aggregator before this one may have left."""
        last = learned - 1 - self._settings.keep_contributions
        names = list(members)
        for window in range(max(0, last - _LOOKED_BACK), last + 1):
            self._remove_contributions(window, names)
        self.after_checkpoint()

    def _remove_contributions(self, window: int, members: Iterable[str]) -> None:
        if window >= 0:
            keys = [self._run.keys.contribution(uid, window) for uid in members]
            with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="retention") as pool:
                list(pool.map(self._gradients.delete, keys))  # what failed is raised

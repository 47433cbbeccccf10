"""What a user says about a mixture of data sets."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed.numbers import whole_number

_log = logging.getLogger(__name__)
Dataset = BlockManager | str | os.PathLike[str]


class Mix:
    """Several data sets as one: by epochs, or by weights. Constructing does no I/O.

    By epochs, an epoch of the loader is so many epochs of each data set, spread over each other evenly and used up
    together. By weights, draws go on for ever, each data set starting over by itself; an epoch of the loader is then
    just a number of steps. Either way each data set keeps the order of its own epochs: every sample of it comes once
    before any comes again.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        *,
        weights: Mapping[str, float] | None = None,
        epochs: Mapping[str, int] | None = None,
        schedule: Mapping[int, Mapping[str, float]] | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Remember what to mix.

        Args:
            datasets: Block stores by name. The name is part of a data set's order.
            weights: Shares of the draws: of sequences, and so of tokens, where they are packed; else of samples. Only
                their ratios count. What is not named is left out, with a warning; 0 says so.
            epochs: How often each comes in an epoch of the loader; once where not named. The default is once each.
            schedule: Other weights from given steps of the run on.
            steps_per_epoch: Steps of an epoch, by weights; else as many as it takes to draw as often as there are
                samples (packed: sequences) in all.
        """
        self.datasets = dict(datasets)
        if not self.datasets:
            raise ConfigError("a mix needs data sets: expected one or more")
        if weights is not None and epochs is not None:
            raise ConfigError("a mix goes by weights or by epochs: give one of them")
        if weights is None and (schedule or steps_per_epoch is not None):
            raise ConfigError("schedule and steps_per_epoch go with weights: give these too")
        if odd := [name for name in self.datasets if not isinstance(name, str)]:
            raise ConfigError(f"data sets are named {odd}: expected texts, which a stored state keeps as they are")
        if steps_per_epoch is not None:
            steps_per_epoch = whole_number("steps_per_epoch", steps_per_epoch)
            if steps_per_epoch < 1:
                raise ConfigError(f"steps_per_epoch={steps_per_epoch} is no epoch: expected 1 or more")
        for told, given in [("weights", weights), ("epochs", epochs), *(schedule or {}).items()]:
            if unknown := set(given or ()) - set(self.datasets):
                where = told if isinstance(told, str) else f"weights from step {told} on"
                raise ConfigError(
                    f"{where} name {', '.join(sorted(unknown))}: expected some of {', '.join(self.datasets)}"
                )
        if weights is not None and (missing := [name for name in self.datasets if name not in weights]):
            _log.warning("weights do not name %s: left out of the mix; give 0 to say so", ", ".join(missing))
        self.weights = _listed(self.datasets, weights) if weights is not None else None
        self.schedule = {
            whole_number("step", int(step) if str(step).isdigit() else step): _listed(self.datasets, given)
            for step, given in (schedule or {}).items()
        }
        self.epochs = [whole_number(f"epochs of {name}", (epochs or {}).get(name, 1)) for name in self.datasets]
        if bad := [name for name, count in zip(self.datasets, self.epochs, strict=True) if count < 1]:
            raise ConfigError(
                f"epochs of {', '.join(bad)} are below 1: expected 1 or more, or leave them out of the mix"
            )
        self.steps_per_epoch = steps_per_epoch


def _listed(names: Mapping[str, object], weights: Mapping[str, float]) -> list[float]:
    """Weights in the data sets' order; what is not named is left out."""
    if bad := [f"{name}={weight!r}" for name, weight in weights.items() if not 0 <= weight < math.inf]:
        raise ConfigError(f"weights {', '.join(bad)} are no shares: expected numbers from 0 on")
    return [float(weights.get(name, 0.0)) for name in names]

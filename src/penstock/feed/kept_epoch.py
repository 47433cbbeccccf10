"""The epoch that batches were asked for by number, kept: finding a batch anew each time would read its window anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.feed.state import LoaderState

T = TypeVar("T")


class KeptEpoch(Generic[T]):
    """One epoch's maker of batches, for as long as what shapes it stays. Pickled, it is empty."""

    def __init__(self) -> None:
        self._kept: tuple[LoaderState, T] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return KeptEpoch, ()

    def get(self, state: LoaderState, make: Callable[[LoaderState], T]) -> T:
        if self._kept is not None:
            before, kept = self._kept
            same_sizes = before.batch_sizes == state.batch_sizes
            # The very same entries: comparing their ids would cost more than it saves.
            if before.epoch == state.epoch and same_sizes and before.exclusions is state.exclusions:
                return kept
        made = make(state)
        self._kept = state, made
        return made

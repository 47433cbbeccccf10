"""Batches of a mixture: draws from several data sets, dealt like those of one.

    mixture ──► which data set each draw of a global batch is from ──► its stream's next draws ──► [rank::world]

A mixture by epochs begins each of its epochs where epochs of its data sets begin. One by weights goes on where it was:
its epochs are stretches of one endless course.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.feed.mix import Mix
from penstock.feed.prefetch import Prefetch
from penstock.feed.rows import merge
from penstock.feed.source_feed import SourceFeed
from penstock.feed.state import ExclusionEntry, LoaderState, StreamPlace
from penstock.feed.steps import Step
from penstock.feed.streams import Stream, Taken, locate, make_stream
from penstock.plans.mixing import Mixture
from penstock.plans.permutation import derive_key


class MixedFeed:
    """Batches of several data sets."""

    is_mixed = True

    def __init__(self, mix: Mix, sources: list[SourceFeed], *, drop_last: bool, prefetch_bytes: int) -> None:
        self._mix = mix
        self._sources = sources
        self._drop_last = drop_last
        self._prefetch_bytes = prefetch_bytes
        self._packed = sources[0].packed
        self._counted: tuple[tuple[int, ...], object, list[int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counted": None}  # goes by objects of this process

    @property
    def sources(self) -> list[SourceFeed]:
        return self._sources

    def shape(self) -> dict[str, Any]:
        mix = self._mix
        by_weights = {
            "weights": mix.weights,
            "schedule": [[step, weights] for step, weights in sorted(mix.schedule.items())],
            "steps_per_epoch": mix.steps_per_epoch,
        }
        return {
            "mix": {source.source: source.data_shape() for source in self._sources},
            **(by_weights if mix.weights is not None else {"epochs": mix.epochs}),
            **self._sources[0].settings_shape(),
            "drop_last": self._drop_last,
        }

    # -- epochs --------------------------------------------------------------------------------------------------------

    def begin(self, state: LoaderState, epoch: int, batch_size: int) -> LoaderState:
        origin = 0
        if self._mix.weights is not None:
            origin = epoch * self._endless_draws(state, batch_size)
        state = replace(state, epoch=epoch, step=0, origin=origin, drawn=0, batch_sizes=(), streams=())
        return replace(state, streams=self._places(state, batch_size, 0))

    def following(self, state: LoaderState) -> LoaderState:
        state = replace(
            state, epoch=state.epoch + 1, step=0, origin=state.origin + state.drawn, drawn=0, batch_sizes=()
        )
        if self._mix.weights is not None:
            return state
        kept = self._kept(state)
        begun = [
            StreamPlace(epoch=state.epoch * epochs, draws=place.draws, tokens=place.tokens)
            for epochs, place in zip(self._mix.epochs, kept, strict=True)
        ]
        return replace(state, streams=tuple(begun), origin=0)

    def refuse_resize(self) -> None:
        if self._mix.weights is not None:
            raise ConfigError(
                "a mix by weights counts epochs and schedule in steps, so its batch size cannot change: go back to the "
                "one it had"
            )

    def batch_count(self, state: LoaderState, batch_size: int) -> int:
        draws = self._draws(state, batch_size)
        if not state.batch_sizes:
            return draws // batch_size if self._drop_last else -(-draws // batch_size)
        step, _ = state.batch_sizes[-1]
        left = max(0, draws - self._drawn_before(state, step, batch_size))  # the last before may have been short
        return step + (left // batch_size if self._drop_last else -(-left // batch_size))

    def _draws(self, state: LoaderState, batch_size: int) -> int:
        """Draws of a state's epoch."""
        if self._mix.weights is not None:
            return self._endless_draws(state, batch_size)
        return sum(self._counts(state))

    def _endless_draws(self, state: LoaderState, batch_size: int) -> int:
        first = state.batch_sizes[0][1] if state.batch_sizes else batch_size
        if self._mix.steps_per_epoch is not None:
            return self._mix.steps_per_epoch * first
        drawn_from = zip(self._streams(replace(state, exclusions=())), self._mix.weights or (), strict=True)
        try:
            draws = sum(stream.draw_count(0) for stream, weight in drawn_from if weight)
        except ConfigError as error:
            raise ConfigError(f"an epoch of this mix has no end yet: give steps_per_epoch ({error})") from error
        return -(-draws // first) * first

    def _counts(self, state: LoaderState) -> list[int]:
        key = (state.epoch, *map(id, state.exclusions))
        if self._counted is None or self._counted[0] != key:
            counts = [
                sum(stream.draw_count(state.epoch * epochs + number) for number in range(epochs))
                for stream, epochs in zip(self._streams(state), self._mix.epochs, strict=True)
            ]
            self._counted = key, state.exclusions, counts
        return self._counted[2]

    def _mixture(self, state: LoaderState, batch_size: int) -> Mixture:
        seed = self._sources[0].settings.seed
        if self._mix.weights is None:
            return Mixture.of_counts(self._counts(state), seed=derive_key("mixture", seed, state.epoch)[0])
        first = state.batch_sizes[0][1] if state.batch_sizes else batch_size
        return Mixture(
            self._mix.weights,
            seed=seed,
            schedule={step * first: weights for step, weights in self._mix.schedule.items()},
        )

    # -- batches -------------------------------------------------------------------------------------------------------

    def steps(self, state: LoaderState, batch_size: int, rank: int, world: int) -> Generator[Step, None, None]:
        ahead = Prefetch(
            self._steps(state, batch_size, rank, world),
            budget_bytes=self._prefetch_bytes,
            size_of=lambda step: step.size_bytes,
            on_wait=self._sources[0].report_to.waited,
        )
        try:
            yield from ahead
        finally:
            ahead.close()

    def at(self, state: LoaderState, k: int, batch_size: int) -> LoaderState:
        raise ConfigError(
            "a mix of data sets counts its tokens as it goes, and cannot be told where it stands: iterate over it"
        )

    def batch(self, state: LoaderState, k: int, batch_size: int, rank: int, world: int) -> dict[str, Any]:
        drawn = self._drawn_before(state, k, batch_size)
        placed = replace(state, step=k, drawn=drawn, streams=())
        placed = replace(placed, streams=self._places(placed, batch_size, drawn))
        size = next((size for step, size in reversed(state.batch_sizes) if step <= k), batch_size)
        return next(self._steps(placed, size, rank, world)).batch

    def _steps(self, state: LoaderState, batch_size: int, rank: int, world: int) -> Iterator[Step]:
        mixture, streams = self._mixture(state, batch_size), self._streams(state)
        places = list(self._kept(state))
        step, drawn, end = state.step, state.drawn, self._draws(state, batch_size)
        while drawn < end and not (self._drop_last and drawn + batch_size > end):
            stop = min(drawn + batch_size, end)
            drawn_from, _ = mixture.at(np.arange(state.origin + drawn, state.origin + stop))
            taken: list[tuple[int, np.ndarray, list[Taken]]] = []
            for number in np.unique(drawn_from).tolist():
                slots = np.flatnonzero(drawn_from == number)
                pieces, places[number] = streams[number].take(places[number], len(slots))
                taken.append((number, slots, pieces))
            batch, size = (self._rows if self._packed else self._texts)(taken, rank, world)
            step, drawn = step + 1, stop
            yield Step(batch, size, {"step": step, "drawn": drawn, "streams": tuple(places)})

    def _texts(
        self, taken: list[tuple[int, np.ndarray, list[Taken]]], rank: int, world: int
    ) -> tuple[dict[str, Any], int]:
        found: list[tuple[int, int, int, Any]] = []
        name, size_bytes = "text", 0
        for number, slots, pieces in taken:
            mine = slots % world == rank
            sample_ids = np.concatenate([piece.sample_ids for piece in pieces if piece.sample_ids is not None])[mine]
            read, size = self._sources[number].reader().batch(sample_ids)
            name = "rows" if "rows" in read else name
            values = read.get("text", read.get("rows", ()))
            size_bytes += size
            found += zip(slots[mine].tolist(), [number] * len(values), sample_ids.tolist(), values, strict=True)
        found.sort(key=lambda entry: entry[0])
        return {
            name: [value for *_, value in found],
            "sample_ids": np.array([sample_id for _, _, sample_id, _ in found], dtype=np.int64),
            "source_ids": np.array([number for _, number, _, _ in found], dtype=np.int64),
        }, size_bytes

    def _rows(
        self, taken: list[tuple[int, np.ndarray, list[Taken]]], rank: int, world: int
    ) -> tuple[dict[str, Any], int]:
        fields = self._sources[0].settings.fields
        shares, placed = [], []
        for number, slots, pieces in taken:
            first = 0
            for piece in pieces:
                here = slots[first : first + piece.stop - piece.start]
                mine = here % world == rank
                first += len(here)
                assert piece.rows is not None
                share = piece.rows.fields(fields, piece.start + np.flatnonzero(mine))
                share["source_ids"] = np.full(len(share["sample_ids"]), number)
                share["row_sources"] = np.full(int(mine.sum()), number)
                shares.append(share)
                placed.append(here[mine])
        batch = merge(shares, np.argsort(np.concatenate(placed)))
        return batch, sum(array.nbytes for array in batch.values())

    # -- places --------------------------------------------------------------------------------------------------------

    def _streams(self, state: LoaderState) -> list[Stream]:
        return [
            make_stream(source, [entry for entry in state.exclusions if entry.source == number])
            for number, source in enumerate(self._sources)
        ]

    def _kept(self, state: LoaderState) -> tuple[StreamPlace, ...]:
        return state.streams or (StreamPlace(),) * len(self._sources)

    def _places(self, state: LoaderState, batch_size: int, drawn: int) -> tuple[StreamPlace, ...]:
        """Where each data set stands after so many draws of a state's epoch, worked out from the beginning."""
        before = self._mixture(state, batch_size).draws_before(state.origin + drawn).tolist()
        firsts = [0 if self._mix.weights is not None else state.epoch * epochs for epochs in self._mix.epochs]
        return tuple(
            locate(stream, source, first, draws)._replace(draws=draws) if draws else StreamPlace(epoch=first)
            for stream, source, first, draws in zip(self._streams(state), self._sources, firsts, before, strict=True)
        )

    def _drawn_before(self, state: LoaderState, k: int, batch_size: int) -> int:
        """Draws of an epoch's first k batches."""
        sizes = [*(state.batch_sizes or ((0, batch_size),)), (k, 0)]
        return sum((min(following, k) - step) * size for (step, size), (following, _) in pairwise(sizes) if step < k)

    # -- exclusions, reports -------------------------------------------------------------------------------------------

    def exclusion(
        self, state: LoaderState, sample_ids: np.ndarray, source: str | None, *, at_once: bool
    ) -> ExclusionEntry:
        names = list(self._mix.datasets)
        if source not in names:
            raise ConfigError(f"source={source!r} is no data set of this mix: expected one of {', '.join(names)}")
        number = names.index(source)
        place = self._kept(state)[number]
        following = place.epoch + 1
        if self._mix.weights is None:  # its draws are counted, and dealt out over the whole epoch
            following = (state.epoch + 1) * self._mix.epochs[number]
            if at_once:
                raise ConfigError(
                    "a mix by epochs has counted this epoch's draws: exclude from the next one on, or mix by weights"
                )
        return ExclusionEntry(
            epoch=place.epoch if at_once else following,
            step=place.offset if at_once and not self._packed else 0,
            window=(place.window + bool(place.offset)) if at_once and self._packed else 0,
            sample_ids=sample_ids,
            source=number,
        )

    def report(self, state: LoaderState, batch_size: int) -> list[dict[str, Any]]:
        """For each data set: its epoch, its draws and tokens so far, its share of the tokens (of the draws, where texts
        are fed), the share it was to have so far by the weights that held, and the weight it has now."""
        mixture, position = self._mixture(state, batch_size), state.origin + state.drawn
        places = self._kept(state)
        tokens, draws = (sum(getattr(place, name) for place in places) for name in ("tokens", "draws"))
        return [
            {
                "name": source.source,
                "epoch": place.epoch,
                "draws": place.draws,
                "tokens": place.tokens,
                "observed_share": place.tokens / tokens if tokens else place.draws / max(1, draws),
                "target_share": float(wanted),
                "weight": float(weight),
            }
            for source, place, wanted, weight in zip(
                self._sources, places, mixture.mean_shares(position), mixture.shares(position), strict=True
            )
        ]

    def report_timings(self) -> dict[str, float]:
        """Of the data sets together; their consumer waits for all of them at once."""
        reports = [source.report_to.report() for source in self._sources]
        return {
            name: sum(report[name] for report in reports) if name.endswith("_s") and "wait" not in name else value
            for name, value in reports[0].items()
        }

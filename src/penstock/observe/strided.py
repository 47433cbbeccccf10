"""What a job on the strided plan has learned: its commits hold the loader's states, and the plan says the rest.

state of one commit ──► state of the next ──► the batches in between, worked out anew from data set and seed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
import orjson

from penstock.blocks import BlockManager
from penstock.errors import ConfigError, LedgerError
from penstock.feed import DistributedLoader, Tokenizer
from penstock.feed.packed_epoch import PackedEpoch
from penstock.feed.source_feed import FeedSettings, SourceFeed, TokenizerChoice
from penstock.feed.state import LoaderState
from penstock.ledger import EpochAudit, LoaderSpan
from penstock.observe.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What lies between two commits: from where the loader stood to where it stood then."""

    span: LoaderSpan
    start: LoaderState
    stop: LoaderState

    @property
    def ends_epoch(self) -> bool:
        return self.stop.epoch > self.span.epoch


class StridedRun:
    """A run on the strided plan, read again."""

    def __init__(self, run: RunFolder, dataset_file: str | None = None) -> None:
        self._run = run
        self._dataset = dataset_file or run.settings["dataset_file"]
        self._feed: SourceFeed | None = None

    def stretches(self) -> Iterator[Stretch]:
        """Of all commits, in order."""
        spans = self._run.ledger.loader_spans()
        states = [LoaderState(shape={}), *(LoaderState.from_dict(orjson.loads(span.state)) for span in spans)]
        for (start, stop), span in zip(pairwise(states), spans, strict=True):
            yield Stretch(span=span, start=start, stop=stop)

    def prove(self, total_samples: int) -> list[EpochAudit]:
        """Audit every epoch. A stretch counts as learned where it took as many steps as it has batches."""
        audits = []
        for epoch, stretches in groupby(self.stretches(), key=lambda stretch: stretch.span.epoch):
            audits.append(self._prove(epoch, list(stretches), total_samples))
        return audits or [self._prove(0, [], total_samples)]

    def _prove(self, epoch: int, stretches: list[Stretch], total: int) -> EpochAudit:
        from pyroaring import BitMap64

        once, twice, foreign = BitMap64(), BitMap64(), 0
        by_session: dict[int, int] = {}
        expected = (0, 0)
        for stretch in stretches:
            planned = self._epoch(epoch, stretch.stop)
            start, stop = (stretch.start.window, stretch.start.offset), self._end(stretch, planned)
            if start != expected or not self._took_all_steps(stretch, planned, start, stop):
                continue  # not what the plan says: its samples stay missing
            expected = stop
            for ids in planned.samples_between(start, stop):
                inside = ids[(ids >= 0) & (ids < total)].astype(np.uint64)
                foreign += len(ids) - len(inside)
                found = BitMap64(inside)
                twice |= once & found
                once |= found
                by_session[stretch.span.session] = by_session.get(stretch.span.session, 0) + len(inside)
        once -= twice
        excluded = BitMap64()
        for entry in stretches[-1].stop.exclusions if stretches else ():
            if entry.epoch <= epoch:
                excluded |= BitMap64(entry.sample_ids.astype(np.uint64))
        excluded -= once | twice
        return EpochAudit(
            epoch=epoch,
            samples=total,
            once=len(once),
            excluded=len(excluded),
            missing=total - len(once) - len(twice) - len(excluded),
            twice=len(twice),
            foreign=foreign,
            by_session=by_session,
        )

    def samples_of_step(self, step: int) -> tuple[LoaderSpan | None, list[list[int]]]:
        """The samples of which a step saw some token, as ranges, and the span that holds it; None where none does."""
        done, after = 0, LoaderState(shape={})
        for stretch in self.stretches():
            if step <= done + stretch.span.steps:
                begun = replace(stretch.start, exclusions=stretch.stop.exclusions, shape=stretch.stop.shape)
                return stretch.span, self._samples_from(begun, step - done - 1)
            done, after = done + stretch.span.steps, stretch.stop
        return None, self._samples_from(after, step - done - 1)

    def _samples_from(self, state: LoaderState, batches: int) -> list[list[int]]:
        """Of the batch that comes so many batches behind a state."""
        loader = self._loader()
        if state.shape:
            loader.load_state_dict(state.as_dict())
        batch = next(islice(iter(loader), batches, None), None)
        if batch is None:
            raise LedgerError(f"the plan of {self._run.path} has no such batch: its metrics are of another run")
        return id_ranges(np.unique(batch["spans"][:, 0]))

    # -- the plan ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _end(stretch: Stretch, planned: PackedEpoch) -> tuple[int, int]:
        return (planned.window_count, 0) if stretch.ends_epoch else (stretch.stop.window, stretch.stop.offset)

    def _took_all_steps(
        self, stretch: Stretch, planned: PackedEpoch, start: tuple[int, int], stop: tuple[int, int]
    ) -> bool:
        if not stretch.ends_epoch:
            return stretch.stop.step - stretch.start.step == stretch.span.steps
        return -(-planned.sequences_between(start, stop) // self._settings["batch_size"]) == stretch.span.steps

    @property
    def _settings(self) -> dict[str, Any]:
        return self._run.settings

    def _blocks(self) -> BlockManager:
        return BlockManager(self._dataset)

    def _tokenizer(self) -> Tokenizer:
        try:
            definition = (self._run.path / "tokenizer.json").read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{self._run.path} has lost its tokenizer.json, without which no batch has an end: restore it"
            ) from error
        config = self._run.config
        return Tokenizer(definition, end_of_text=config["end_of_text"] or None, engine=config["tokenizer_engine"])

    def _epoch(self, epoch: int, state: LoaderState) -> PackedEpoch:
        if self._feed is None:
            settings = FeedSettings(
                seed=self._settings["seed"],
                order="shard-local",
                sequence_length=self._settings["max_seq_len"],
                packing="concatenate",
                learn="all",
                chat_template=None,
                fields=("input_ids",),
            )
            self._feed = SourceFeed(self._blocks(), settings, TokenizerChoice(self._tokenizer()))
        shape = self._feed.data_shape() | self._feed.settings_shape()
        state.refuse_other({**shape, "drop_last": False, "batch_size": self._settings["batch_size"]})
        return self._feed.packed_epoch(epoch, list(state.exclusions))

    def _loader(self) -> DistributedLoader:
        return DistributedLoader(
            self._blocks(),
            self._settings["batch_size"],
            self._settings["seed"],
            rank=0,
            world_size=1,
            tokenizer=self._tokenizer(),
            sequence_length=self._settings["max_seq_len"],
            fields=("input_ids", "spans"),
        )


def id_ranges(ids: np.ndarray) -> list[list[int]]:
    """Ascending ids as ranges from and to."""
    if not len(ids):
        return []
    gaps = np.flatnonzero(np.diff(ids) > 1)
    return [[int(ids[first]), int(ids[last]) + 1] for first, last in zip([0, *(gaps + 1)], [*gaps, -1], strict=True)]

"""DistributedLoader: global batches of a data set, dealt to ranks; the same on any world size, resumed anywhere.

strided plan ──► batch k of the epoch ──► rank's share [rank::world] ──► texts, or packed sequences, with sample ids
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blocks import BlockManager
from penstock.errors import ConfigError, PenstockError
from penstock.feed.mix import Mix
from penstock.feed.numbers import sample_numbers, whole_number
from penstock.feed.pieces import PACKINGS, Packing
from penstock.feed.plain_feed import Feed, PlainFeed
from penstock.feed.rows import FIELDS, FieldName
from penstock.feed.source_feed import FeedSettings, Learn, SourceFeed, TokenizerChoice
from penstock.feed.state import LoaderState
from penstock.feed.steps import Batch, Steps
from penstock.feed.token_cache import TokenCache
from penstock.feed.world import settle_world
from penstock.plans.orders import ORDERS, OrderName

if TYPE_CHECKING:
    from penstock.feed.known_tokenizer import KnownTokenizer
    from penstock.feed.tokenizer import Tokenizer

Dataset = BlockManager | str | os.PathLike[str]


class DistributedLoader:
    """Batches of a block store for one rank of a world.

    Iterating runs from where it stands to the end of the epoch, where it stands at the beginning of the next.
    Constructing does no I/O. Order is a pure function of (seed, epoch, position): no rank talks to another. A state is
    the same on every rank and restores on any number of them; it counts the batches that were handed out, not those
    made ahead. Not safe for several threads.
    """

    def __init__(
        self,
        dataset: Dataset | Mix,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        tokenizer: Tokenizer | KnownTokenizer | str | os.PathLike[str] | None = None,
        sequence_length: int | None = None,
        packing: Packing = "concatenate",
        learn: Learn = "all",
        chat_template: str | None = None,
        fields: tuple[FieldName, ...] = ("input_ids", "labels", "position_ids", "document_ids"),
        order: OrderName = "shard-local",
        drop_last: bool = False,
        prefetch_bytes: int = 256 << 20,
        cache: TokenCache | None = None,
    ) -> None:
        """Remember what to load.

        Args:
            dataset: An open block store, or its path; or a mix of several.
            batch_size: Samples of a global batch, over all ranks; sequences of it, where they are packed. Of a short
                one, or where there are more ranks than that, a rank may have none: its arrays have no rows.
            seed: Of the order.
            rank: This process's number, from 0.
            world_size: How many there are. Neither given, it is alone; refused where RANK and WORLD_SIZE say otherwise.
            tokenizer: A `tokenizer.json`, a folder with one, a tiktoken file, a model of the Hub, or one that is
                loaded. Given, batches are packed sequences of ids; else they hold texts.
            sequence_length: Tokens a sequence; at most so many where they are ragged.
            packing: concatenate (documents end to end, cut into sequences), best-fit (documents whole, several a
                sequence), pad or ragged (a document a sequence). Longer ones are split, never cut off.
            learn: What labels hold: every token, or the assistant's turns of chats (instructions and prompts too).
            chat_template: How chats are written, where `learn` is "assistant": chatml, llama3, plain or a Jinja
                template; else the tokenizer's own, or the first that its special tokens suit.
            fields: The arrays of a packed batch; fewer cost less. Labels are shifted: each is the token that follows.
            order: sequential, shuffled, shard-local or numpy.
            drop_last: Whether a short last batch of an epoch is left out.
            prefetch_bytes: How much may be made ahead.
            cache: The token cache; beside the data set where not given.
        """
        batch_size, seed = whole_number("batch_size", batch_size), whole_number("seed", seed)
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} holds no sample: expected 1 or more")
        if order not in ORDERS:
            raise ConfigError(f"order={order!r} is unknown: expected one of {', '.join(ORDERS)}")
        if order == "numpy" and seed < 0:
            raise ConfigError(f"seed={seed} is none of numpy's, and order='numpy' goes by them: expected 0 or more")
        if (tokenizer is None) != (sequence_length is None):
            raise ConfigError("tokenizer and sequence_length belong together: give both, or neither for texts")
        sequence_length = None if sequence_length is None else whole_number("sequence_length", sequence_length)
        if sequence_length is not None and sequence_length < 2:
            raise ConfigError(f"sequence_length={sequence_length} leaves nothing to predict: expected 2 or more")
        if packing not in PACKINGS:
            raise ConfigError(f"packing={packing!r} is unknown: expected one of {', '.join(PACKINGS)}")
        if learn not in ("all", "assistant"):
            raise ConfigError(f"learn={learn!r} is unknown: expected 'all' or 'assistant'")
        if learn == "assistant" and tokenizer is None:
            raise ConfigError("learn='assistant' needs a tokenizer: it is tokens that are learned or not")
        fields = tuple(fields)  # a list would be slower where ids alone are asked for
        if unknown := [name for name in fields if name not in FIELDS]:
            raise ConfigError(f"fields {', '.join(unknown)} are unknown: expected some of {', '.join(FIELDS)}")
        if isinstance(dataset, Mapping | list | tuple):
            raise ConfigError(f"dataset is a {type(dataset).__name__}: expected one, or penstock.Mix of several")
        if cache is not None and isinstance(dataset, Mix):
            raise ConfigError("cache is of one data set, and this is a mix of several: leave it out")
        self.batch_size = batch_size
        self.rank, self.world_size = settle_world(rank, world_size, batch_size)
        self._settings = FeedSettings(
            seed=seed,
            order=order,
            sequence_length=sequence_length,
            packing=packing,
            learn=learn,
            chat_template=chat_template,
            fields=fields,
        )
        self._feed = self._make_feed(dataset, TokenizerChoice(tokenizer), cache, prefetch_bytes, drop_last=drop_last)
        self._begun = LoaderState(shape={})
        self._steps: Steps | None = None
        """What is being handed out since, if the state was not set since,"""
        self._handed = 0
        """and how many of its batches were: one is handed out far more often than the state is asked for."""
        self._changes = 0
        self._iterations = 0

    def _make_feed(
        self,
        dataset: Dataset | Mix,
        tokenizer: TokenizerChoice,
        cache: TokenCache | None,
        prefetch_bytes: int,
        *,
        drop_last: bool,
    ) -> Feed:
        def source(dataset: Dataset, name: str = "") -> SourceFeed:
            blocks = dataset if isinstance(dataset, BlockManager) else BlockManager(dataset)
            return SourceFeed(blocks, self._settings, tokenizer, source=name, cache=cache)

        if isinstance(dataset, Mix):
            from penstock.feed.mixed_feed import MixedFeed

            sources = [source(mixed, name) for name, mixed in dataset.datasets.items()]
            return MixedFeed(dataset, sources, drop_last=drop_last, prefetch_bytes=prefetch_bytes)
        return PlainFeed(source(dataset), drop_last=drop_last, prefetch_bytes=prefetch_bytes)

    @property
    def tokenizer(self) -> Tokenizer | KnownTokenizer | None:
        """The tokenizer, with the engine that suits it; None where texts are fed."""
        return self._feed.sources[0].tokenizer

    @property
    def seed(self) -> int:
        return self._settings.seed

    @property
    def _state(self) -> LoaderState:
        if self._steps is None:
            return self._begun
        return replace(self._begun, **self._steps.place(self._handed))

    @_state.setter
    def _state(self, state: LoaderState) -> None:
        self._begun, self._steps = state, None

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where it stands to the end of the epoch. One iteration at a time: a new one ends the old."""
        epoch = self._state.epoch
        self._iterations += 1
        iteration = self._iterations
        while True:
            changes = self._changes
            made = self._feed.steps(self._state, self.batch_size, self.rank, self.world_size)
            timings = self._feed.sources[0].report_to
            try:
                for steps in made:
                    self._steps = steps
                    for self._handed, batch in enumerate(steps.batches, start=1):
                        timings.batches += 1
                        yield batch
                        if self._steps is not steps:  # the state was set meanwhile
                            self._refuse_older(iteration)
                            if changes != self._changes:
                                break
                            self._steps = steps
                    if changes != self._changes:
                        break  # what was made ahead is of the plan before
                else:
                    break
            finally:
                made.close()
            if self._state.epoch != epoch:
                return
        self._state = self._feed.following(self._state)

    def _refuse_older(self, iteration: int) -> None:
        if iteration != self._iterations:  # its batches would be counted as if they were the new one's
            raise PenstockError("another iteration over this loader has begun: this one cannot go on; use that one")

    def batch(self, epoch: int, k: int) -> Batch:
        """Batch k of an epoch, as this rank gets it: a pure function, wherever the loader stands."""
        state, epoch, k = self._state, whole_number("epoch", epoch), whole_number("k", k)
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} does not exist: expected 0 or more")
        if epoch != state.epoch:
            state = self._feed.begin(state, epoch, self.batch_size)
        count = self._feed.batch_count(state, self.batch_size)
        if not 0 <= k < count:
            raise ConfigError(f"epoch {epoch} has no batch {k}: its batches are 0 to {count - 1}")
        return self._feed.batch(state, k, self.batch_size, self.rank, self.world_size)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the current epoch, the same for every rank. Packed, it needs the whole token cache."""
        return self._feed.batch_count(self._state, self.batch_size)

    def __len__(self) -> int:
        """Batches of the current epoch; a TypeError where that is not known yet, as `list` and others expect it."""
        try:
            return self.batches_per_epoch
        except ConfigError as error:
            raise TypeError(str(error)) from error

    def __getitem__(self, k: int) -> Batch:
        """Batch k of the current epoch: what a torch DataLoader with ``batch_size=None`` asks for."""
        if not 0 <= k < len(self):
            raise IndexError(f"batch {k} of {len(self)}")
        return self.batch(self._state.epoch, k)

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def step(self) -> int:
        """Batches of this epoch that were handed out."""
        return self._state.step

    @property
    def position(self) -> LoaderState:
        """Where it stands, as a value that costs nothing to keep: for whoever makes batches ahead. See `state_at`."""
        return self._state

    @property
    def state_changes(self) -> int:
        """Grows whenever what follows is not what was to follow: whoever has made batches ahead drops them."""
        return self._changes

    def go_to(self, step: int) -> None:
        """Stand before batch `step` of this epoch, as if those before it had been handed out; for whoever takes batches
        by number. Packed, it needs the whole token cache."""
        step = whole_number("step", step)
        if not 0 <= step <= self.batches_per_epoch:
            raise ConfigError(f"step={step} is not in an epoch of {self.batches_per_epoch} batches")
        self._state = self._feed.at(self._state, step, self.batch_size)
        self._changes += 1

    def reshuffle(self, epoch: int) -> None:
        """Go to the beginning of an epoch; where it stands in that epoch already, nothing changes."""
        epoch = whole_number("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} does not exist: expected 0 or more")
        if epoch != self._state.epoch:
            self._state = self._feed.begin(self._state, epoch, self.batch_size)
            self._changes += 1

    def exclude(
        self, sample_ids: Collection[int] | np.ndarray, *, source: str | None = None, at_once: bool = False
    ) -> None:
        """Leave samples out, from the next epoch on or from the next batch on (packed: from the next window on).

        To be called with the same ids at the same step on every rank.

        Args:
            sample_ids: Which.
            source: Of which data set of a mix.
            at_once: From the next batch on, not from the next epoch on.
        """
        ids = sample_numbers(sample_ids)
        entry = self._feed.exclusion(self._state, ids, source, at_once=at_once)
        total = self._feed.sources[entry.source].ranges.total_samples
        if len(ids) and (ids[0] < 0 or ids[-1] >= total):
            raise ConfigError(f"samples {ids[0]} to {ids[-1]} are not all in 0 to {total - 1}: nothing was excluded")
        self._state = replace(self._state, exclusions=(*self._state.exclusions, entry))
        # A data set of a mix may begin its next epoch at any step.
        self._changes += at_once or self._feed.is_mixed

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as JSON: the same on every rank, good for any number of them."""
        return self.state_at(self._state)

    def state_at(self, position: LoaderState) -> dict[str, Any]:
        """What `state_dict` told, or would have told, when it stood there."""
        return replace(position, shape=self._shape()).as_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go to where a state stands; refused where its batches would not be these.

        Args:
            state: From `state_dict`, of any rank.
            allow: Settings that may differ; only ``batch_size`` can, and the samples go on without a gap.
        """
        if other := set(allow) - {"batch_size"}:
            raise ConfigError(f"allow={sorted(other)} cannot be: only batch_size may change")
        loaded = LoaderState.from_dict(state)
        loaded.refuse_other(self._shape(), allow)
        before = int(loaded.shape["batch_size"])
        if before != self.batch_size:
            self._feed.refuse_resize()
        if before != self.batch_size and loaded.step:
            earlier = loaded.batch_sizes or ((0, before),)
            loaded = replace(loaded, batch_sizes=(*earlier, (loaded.step, self.batch_size)))
        self._state = replace(loaded, shape={})
        self._changes += 1

    def timings(self) -> dict[str, float]:
        """How long the consumer waited for batches, and what the feed did meanwhile; see `Timings.report`."""
        return self._feed.report_timings()

    def mixture(self) -> list[dict[str, Any]]:
        """What each data set of a mix has given so far, against what it was to give; see `MixedFeed.report`."""
        return self._feed.report(self._state, self.batch_size)

    @property
    def token_cache(self) -> TokenCache:
        """Of the data set; of a mix, that of its first."""
        return self._feed.sources[0].token_cache

    def _shape(self) -> dict[str, Any]:
        """Everything that makes the batches what they are."""
        return {**self._feed.shape(), "batch_size": self.batch_size}

"""DistributedLoader: global batches of a data set, dealt to ranks; the same on any world size, resumed anywhere.

strided plan ──► batch k of the epoch ──► rank's share [rank::world] ──► texts, or packed sequences, with sample ids
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.blocks import BlockManager
from penstock.errors import ConfigError
from penstock.feed.engines import EngineName
from penstock.feed.kept_epoch import KeptEpoch
from penstock.feed.loading import load_tokenizer
from penstock.feed.packed_epoch import PackedEpoch
from penstock.feed.ranges import BlockRanges
from penstock.feed.sequences import FIELDS, FieldName
from penstock.feed.state import ExclusionEntry, LoaderState
from penstock.feed.text_epoch import Step, TextEpoch
from penstock.feed.timings import Timings
from penstock.feed.token_cache import CHUNK_BYTES, TokenCache, chunk_samples
from penstock.feed.tokenizer import Tokenizer
from penstock.feed.world import settle_world
from penstock.plans.orders import ORDERS, OrderName, make_order

WINDOW_CHUNKS = 32
Batch = dict[str, Any]


class DistributedLoader:
    """Batches of a block store for one rank of a world.

    Iterating runs from where it stands to the end of the epoch, where it stands at the beginning of the next.
    Constructing does no I/O. Order is a pure function of (seed, epoch, position): no rank talks to another. A state is
    the same on every rank and restores on any number of them; it counts the batches that were handed out, not those
    made ahead. Not safe for several threads.
    """

    def __init__(
        self,
        dataset: BlockManager | str | os.PathLike[str],
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        sequence_length: int | None = None,
        fields: tuple[FieldName, ...] = ("input_ids", "labels", "position_ids", "document_ids"),
        order: OrderName = "shard-local",
        drop_last: bool = False,
        prefetch_bytes: int = 256 << 20,
        cache: TokenCache | None = None,
    ) -> None:
        """Remember what to load.

        Args:
            dataset: An open block store, or its path.
            batch_size: Samples of a global batch, over all ranks; sequences of it, where they are packed.
            seed: Of the order.
            rank: This process's number, from 0.
            world_size: How many there are. Neither given, it is alone; refused where RANK and WORLD_SIZE say otherwise.
            tokenizer: A `tokenizer.json`, a folder with one, a tiktoken file, a model of the Hub, or one that is
                loaded. Given, batches are packed sequences of ids; else they hold texts.
            sequence_length: Tokens a sequence.
            fields: The arrays of a packed batch; fewer cost less.
            order: sequential, shuffled, shard-local or numpy.
            drop_last: Whether a short last batch of an epoch is left out.
            prefetch_bytes: How much may be made ahead.
            cache: The token cache; beside the data set where not given.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} holds no sample: expected 1 or more")
        if order not in ORDERS:
            raise ConfigError(f"order={order!r} is unknown: expected one of {', '.join(ORDERS)}")
        if (tokenizer is None) != (sequence_length is None):
            raise ConfigError("tokenizer and sequence_length belong together: give both, or neither for texts")
        if unknown := [name for name in fields if name not in FIELDS]:
            raise ConfigError(f"fields {', '.join(unknown)} are unknown: expected some of {', '.join(FIELDS)}")
        self.blocks = dataset if isinstance(dataset, BlockManager) else BlockManager(dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.rank, self.world_size = settle_world(rank, world_size)
        self._tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.fields = fields
        self.order: OrderName = order
        self.drop_last = drop_last
        self.prefetch_bytes = prefetch_bytes
        self._cache = cache
        self._state = LoaderState(shape={})
        self._changes = 0
        self._timings = Timings()
        self._opened: tuple[BlockRanges, int] | None = None
        self._texts_kept = KeptEpoch[TextEpoch]()
        self._packed_kept = KeptEpoch[PackedEpoch]()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, loaded on first use with the engine that suits it; None where texts are fed."""
        if self._tokenizer is not None and not isinstance(self._tokenizer, Tokenizer):
            self._tokenizer = load_tokenizer(os.fspath(self._tokenizer), self.blocks)
        return self._tokenizer

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where it stands to the end of the epoch."""
        epoch = self._state.epoch
        while True:
            changes = self._changes
            steps = self._steps()
            try:
                for step in steps:
                    self._state = replace(self._state, step=step.next_step, window=step.window, offset=step.offset)
                    yield step.batch
                    if changes != self._changes:
                        break  # what was made ahead is of the plan before
                else:
                    break
            finally:
                steps.close()
            if self._state.epoch != epoch:
                return
        self._state = replace(self._state, epoch=epoch + 1, step=0, window=0, offset=0, batch_sizes=())

    def _steps(self) -> Generator[Step, None, None]:
        state = self._state
        if self.tokenizer is None:
            return self._texts(state).steps_ahead(state.step, self.rank, self.world_size, self.prefetch_bytes)
        return self._packed(state).steps(state, self.batch_size, self.rank, self.world_size, drop_last=self.drop_last)

    def batch(self, epoch: int, k: int) -> Batch:
        """Batch k of an epoch, as this rank gets it: a pure function, wherever the loader stands."""
        state = self._state if epoch == self._state.epoch else replace(self._state, epoch=epoch, batch_sizes=())
        if not 0 <= k < self._batch_count(state):
            raise ConfigError(f"epoch {epoch} has no batch {k}: its batches are 0 to {self._batch_count(state) - 1}")
        if self.tokenizer is None:
            return self._texts_kept.get(state, self._texts).batch(k, self.rank, self.world_size)
        return self._packed_kept.get(state, self._packed).batch(k, self.batch_size, self.rank, self.world_size)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the current epoch, the same for every rank. Packed, it needs the whole token cache."""
        return self._batch_count(self._state)

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
    def state_changes(self) -> int:
        """Grows whenever what follows is not what was to follow: whoever has made batches ahead drops them."""
        return self._changes

    def reshuffle(self, epoch: int) -> None:
        """Go to the beginning of an epoch; where it stands in that epoch already, nothing changes."""
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} does not exist: expected 0 or more")
        if epoch != self._state.epoch:
            self._state = replace(self._state, epoch=epoch, step=0, window=0, offset=0, batch_sizes=())
            self._changes += 1

    def go_to(self, step: int) -> None:
        """Stand before batch `step` of this epoch, as if those before it had been handed out; for whoever takes batches
        by number. Packed, it needs the whole token cache."""
        if not 0 <= step <= self.batches_per_epoch:
            raise ConfigError(f"step={step} is not in an epoch of {self.batches_per_epoch} batches")
        window, offset = 0, 0
        if self.tokenizer is not None:
            window, offset = self._packed_kept.get(self._state, self._packed).place(step * self.batch_size)
        self._state = replace(self._state, step=step, window=window, offset=offset)
        self._changes += 1

    def exclude(self, sample_ids: Collection[int] | np.ndarray, *, at_once: bool = False) -> None:
        """Leave samples out, from the next epoch on or from the next batch on (packed: from the next window on).

        To be called with the same ids at the same step on every rank.
        """
        ids = np.unique(np.fromiter(sample_ids, dtype=np.int64))
        total = self._ranges.total_samples
        if len(ids) and (ids[0] < 0 or ids[-1] >= total):
            raise ConfigError(f"samples {ids[0]} to {ids[-1]} are not all in 0 to {total - 1}: nothing was excluded")
        state = self._state
        entry = ExclusionEntry(
            epoch=state.epoch if at_once else state.epoch + 1,
            step=state.step if at_once else 0,
            window=(state.window + bool(state.offset)) if at_once else 0,
            sample_ids=ids,
        )
        self._state = replace(state, exclusions=(*state.exclusions, entry))
        self._changes += at_once

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as JSON: the same on every rank, good for any number of them."""
        return replace(self._state, shape=self._shape()).as_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go to where a state stands; refused where its batches would not be these.

        Args:
            state: From `state_dict`, of any rank.
            allow: Settings that may differ; only ``batch_size`` can, and the samples go on without a gap.
        """
        if other := set(allow) - {"batch_size"}:
            raise ConfigError(f"allow={sorted(other)} cannot be: only batch_size may change")
        loaded = LoaderState.from_dict(state)
        shape = self._shape()
        loaded.refuse_other(shape, allow)
        before = int(loaded.shape["batch_size"])
        if before != self.batch_size and loaded.step:
            earlier = loaded.batch_sizes or ((0, before),)
            loaded = replace(loaded, batch_sizes=(*earlier, (loaded.step, self.batch_size)))
        self._state = replace(loaded, shape={})
        self._changes += 1

    def timings(self) -> dict[str, float]:
        """How long the consumer waited for batches, and what the feed did meanwhile; see `Timings.report`."""
        return (self._timings if self.tokenizer is None else self.token_cache.timings).report()

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def token_cache(self) -> TokenCache:
        if self._cache is None:
            if self.tokenizer is None:
                raise ConfigError("there is no token cache without a tokenizer: name one")
            self._cache = TokenCache(self.blocks, self.tokenizer)
        return self._cache

    @property
    def _ranges(self) -> BlockRanges:
        return self._open()[0]

    def _open(self) -> tuple[BlockRanges, int]:
        if self._opened is None:
            ranges = BlockRanges(self.blocks)
            self._opened = ranges, chunk_samples(self.blocks, ranges)
        return self._opened

    def _order(self, epoch: int) -> Any:
        ranges, chunk_size = self._open()
        return make_order(
            self.order,
            ranges.total_samples,
            seed=self.seed,
            epoch=epoch,
            chunk_size=chunk_size,
            window_chunks=WINDOW_CHUNKS,
        )

    def _texts(self, state: LoaderState) -> TextEpoch:
        ranges, chunk_size = self._open()
        first = state.batch_sizes[0][1] if state.batch_sizes else self.batch_size
        return TextEpoch(
            self.blocks,
            ranges,
            self._order(state.epoch),
            first,
            state=state,
            drop_last=self.drop_last,
            chunk_size=chunk_size if self.order in ("sequential", "shard-local") else 1,
            cache_bytes=2 * WINDOW_CHUNKS * CHUNK_BYTES,
            timings=self._timings,
        )

    def _packed(self, state: LoaderState) -> PackedEpoch:
        assert self.tokenizer is not None
        assert self.sequence_length is not None
        _, chunk_size = self._open()
        return PackedEpoch(
            self.token_cache,
            self._order(state.epoch),
            state=state,
            window_samples=chunk_size * WINDOW_CHUNKS,
            sequence_length=self.sequence_length,
            pad_id=self.tokenizer.end_of_text_id,
            fields=self.fields,
        )

    def _batch_count(self, state: LoaderState) -> int:
        if self.tokenizer is None:
            return self._texts_kept.get(state, self._texts).batch_count
        if state.batch_sizes:
            raise ConfigError(
                "the batch size changed in the middle of this epoch, and packed batches have no numbers until the "
                "next: iterate to its end"
            )
        return self._packed_kept.get(state, self._packed).batch_count(self.batch_size, drop_last=self.drop_last)

    def _shape(self) -> dict[str, Any]:
        """Everything that makes the batches what they are."""
        manifest = self.blocks.manifest
        packed: dict[str, Any] = {}
        if self.tokenizer is not None:
            engine: EngineName = self.tokenizer.engine
            packed = {
                "sequence_length": self.sequence_length,
                "tokenizer": self.tokenizer.fingerprint,
                "engine": engine,
            }
        return {
            "dataset_id": manifest.header.dataset_id,
            "fingerprint": manifest.fingerprint,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "order": self.order,
            "chunk_size": self._open()[1],
            "window_chunks": WINDOW_CHUNKS,
            "drop_last": self.drop_last,
            **packed,
        }

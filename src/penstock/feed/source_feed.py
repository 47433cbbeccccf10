"""One data set under the settings of a loader: its order, its texts, its tokens."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.blocks import BlockManager
from penstock.errors import ConfigError, differences
from penstock.feed.known_tokenizer import KnownTokenizer, know_tokenizer
from penstock.feed.packed_epoch import LastWindow, PackedEpoch
from penstock.feed.pieces import Packing
from penstock.feed.ranges import BlockRanges
from penstock.feed.rows import FieldName
from penstock.feed.state import ExclusionEntry
from penstock.feed.texts import SampleReader
from penstock.feed.timings import Timings
from penstock.feed.token_cache import CHUNK_BYTES, TokenCache, chunk_samples
from penstock.plans.orders import Order, OrderName, make_order

if TYPE_CHECKING:
    from penstock.feed.chat import ChatFormat
    from penstock.feed.tokenizer import Tokenizer

WINDOW_CHUNKS = 32
_EPOCHS_KEPT = 16
Learn = Literal["all", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    """What shapes the samples and sequences of a loader, whatever data set they come from."""

    seed: int
    order: OrderName
    sequence_length: int | None
    """None: texts are fed, and what follows has no meaning."""
    packing: Packing
    learn: Learn
    chat_template: str | None
    fields: tuple[FieldName, ...]


class TokenizerChoice:
    """A tokenizer, or what names one: looked for on first use, with the engine that suits a data set."""

    def __init__(self, chosen: Tokenizer | KnownTokenizer | str | os.PathLike[str] | None) -> None:
        self._chosen = chosen

    def find(self, blocks: BlockManager) -> Tokenizer | KnownTokenizer | None:
        if isinstance(self._chosen, str | os.PathLike):
            self._chosen = know_tokenizer(os.fspath(self._chosen), blocks)
        return self._chosen


class SourceFeed:
    """One data set, as a loader feeds it. Constructing does no I/O."""

    def __init__(
        self,
        blocks: BlockManager,
        settings: FeedSettings,
        tokenizer: TokenizerChoice,
        *,
        source: str = "",
        cache: TokenCache | None = None,
    ) -> None:
        """Remember what to feed.

        Args:
            blocks: The data set.
            settings: How.
            tokenizer: With what, where tokens are fed.
            source: Its name in a mixture: part of its order, so that equal data sets are shuffled differently.
            cache: Its token cache; beside it where not given.
        """
        self.blocks = blocks
        self.settings = settings
        self.source = source
        self.timings = Timings()
        self._tokenizer = tokenizer
        self._given_cache = cache
        self._cache: TokenCache | None = None
        self._opened: tuple[BlockRanges, int] | None = None
        self._reader: SampleReader | None = None
        self._last_window = LastWindow()
        self._epochs: OrderedDict[tuple[int, ...], tuple[list[ExclusionEntry], PackedEpoch]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_epochs": OrderedDict()}  # what they have read can be read again

    @property
    def packed(self) -> bool:
        return self.settings.sequence_length is not None

    @property
    def tokenizer(self) -> Tokenizer | KnownTokenizer | None:
        return self._tokenizer.find(self.blocks)

    @property
    def token_cache(self) -> TokenCache:
        if self._cache is None:
            tokenizer = self.tokenizer
            if tokenizer is None:
                raise ConfigError("there is no token cache without a tokenizer: name one")
            if self._given_cache is not None:
                self._cache = self._fitting(self._given_cache, tokenizer)
            else:
                self._cache = TokenCache(self.blocks, tokenizer, chat=self._chat(tokenizer))
        return self._cache

    def _chat(self, tokenizer: Tokenizer | KnownTokenizer) -> ChatFormat | None:
        if self.settings.learn == "all":
            return None
        from penstock.feed.chat import ChatFormat

        return ChatFormat(tokenizer, self.settings.chat_template)

    def _fitting(self, cache: TokenCache, tokenizer: Tokenizer | KnownTokenizer) -> TokenCache:
        """The cache that was given; refused where its tokens are not those that the loader was asked for."""
        template = self.settings.chat_template
        chat = self._chat(tokenizer) if template is not None else cache.chat
        got = {
            "data set": cache.blocks.manifest.fingerprint,
            "tokenizer": cache.tokenizer.fingerprint,
            "learn": "all" if cache.chat is None else "assistant",
            "chat template": cache.chat.fingerprint if cache.chat else None,
        }
        expected = {
            "data set": self.blocks.manifest.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "learn": self.settings.learn,
            "chat template": chat.fingerprint if chat else None,
        }
        if different := differences(got, expected):
            raise ConfigError(
                f"the cache that was given holds other tokens than this loader feeds: {'; '.join(different)}: leave "
                "cache= out, or make it of the same data set, tokenizer and chat format (chat=ChatFormat(...))"
            )
        return cache

    @property
    def ranges(self) -> BlockRanges:
        return self._open()[0]

    @property
    def chunk_size(self) -> int:
        return self._open()[1]

    def order(self, epoch: int) -> Order:
        return make_order(
            self.settings.order,
            self.ranges.total_samples,
            seed=self.settings.seed,
            epoch=epoch,
            source=self.source,
            chunk_size=self.chunk_size,
            window_chunks=WINDOW_CHUNKS,
        )

    def reader(self) -> SampleReader:
        """Texts and rows of samples, by chunks where the order goes by chunks."""
        if self._reader is None:
            by_chunks = self.settings.order in ("sequential", "shard-local")
            self._reader = SampleReader(
                self.blocks,
                self.ranges,
                chunk_size=self.chunk_size if by_chunks else 1,
                cache_bytes=2 * WINDOW_CHUNKS * CHUNK_BYTES,
                timings=self.timings,
            )
        return self._reader

    def packed_epoch(self, epoch: int, exclusions: list[ExclusionEntry]) -> PackedEpoch:
        """One epoch of it; those asked for last are kept, with what they have counted."""
        key = (epoch, *map(id, exclusions))
        kept = self._epochs.get(key)
        if kept is None:
            kept = self._epochs[key] = exclusions, self._packed_epoch(epoch, exclusions)
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return kept[1]

    def _packed_epoch(self, epoch: int, exclusions: list[ExclusionEntry]) -> PackedEpoch:
        assert self.settings.sequence_length is not None
        assert self.tokenizer is not None
        return PackedEpoch(
            self.token_cache,
            self.order(epoch),
            epoch=epoch,
            exclusions=exclusions,
            window_samples=self.chunk_size * WINDOW_CHUNKS,
            packing=self.settings.packing,
            sequence_length=self.settings.sequence_length,
            pad_id=self.tokenizer.end_of_text_id,
            fields=self.settings.fields,
            last_window=self._last_window,
        )

    @property
    def report_to(self) -> Timings:
        """Where its waits and its work are counted."""
        return self.token_cache.timings if self.packed else self.timings

    def data_shape(self) -> dict[str, Any]:
        """Everything about its data that makes batches what they are."""
        manifest = self.blocks.manifest
        return {
            "dataset_id": manifest.header.dataset_id,
            "fingerprint": manifest.fingerprint,
            "chunk_size": self.chunk_size,
        }

    def settings_shape(self) -> dict[str, Any]:
        """Everything about the settings that does."""
        shape: dict[str, Any] = {
            "seed": self.settings.seed,
            "order": self.settings.order,
            "window_chunks": WINDOW_CHUNKS,
        }
        if not self.packed:
            return shape
        assert self.tokenizer is not None
        chat = self.token_cache.chat
        return shape | {
            "sequence_length": self.settings.sequence_length,
            "packing": self.settings.packing,
            "learn": self.settings.learn,
            "tokenizer": self.tokenizer.fingerprint,
            "engine": self.tokenizer.engine,
            **({"chat_template": chat.fingerprint} if chat else {}),
        }

    def _open(self) -> tuple[BlockRanges, int]:
        if self._opened is None:
            ranges = BlockRanges(self.blocks)
            self._opened = ranges, chunk_samples(self.blocks, ranges)
        return self._opened

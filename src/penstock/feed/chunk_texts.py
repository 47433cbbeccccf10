"""From a chunk's rows to its tokens: texts, chats, or what came tokenised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.blocks import BlockManager
from penstock.errors import ConfigError, SourceError
from penstock.feed.ranges import BlockRanges
from penstock.feed.timings import Timings
from penstock.feed.token_store import TokenChunk

if TYPE_CHECKING:
    from penstock.feed.chat import ChatFormat
    from penstock.feed.known_tokenizer import KnownTokenizer
    from penstock.feed.tokenizer import Encoded, Tokenizer


class TokenCacheHeader(NamedTuple):
    """What a token cache belongs to."""

    version: int
    fingerprint: str
    """Of the data set with every block's checksum: tokens of other bytes are other tokens."""
    tokenizer_fingerprint: str
    dtype: str
    vocab_size: int
    chunk_size: int
    total_samples: int
    chat_fingerprint: str | None = None
    """Where samples are chats: how they are written."""


class ChunkTexts:
    """Reads and tokenises chunks. Safe for threads."""

    def __init__(
        self,
        blocks: BlockManager,
        ranges: BlockRanges,
        tokenizer: Tokenizer | KnownTokenizer,
        chat: ChatFormat | None,
        header: TokenCacheHeader,
        timings: Timings,
    ) -> None:
        self._blocks = blocks
        self._ranges = ranges
        self._tokenizer = tokenizer
        self._chat = chat
        self._header = header
        self._timings = timings

    def rows(self, number: int) -> list[dict[str, Any]]:
        """A chunk's rows."""
        size, total = self._header.chunk_size, self._header.total_samples
        rows: list[dict[str, Any]] = []
        for piece in self._ranges.pieces(number * size, min((number + 1) * size, total)):
            with self._timings.of("fetch"):
                data = self._blocks.read_range(piece.block_id, piece.start, piece.stop)
            with self._timings.of("decode"):
                rows += self._blocks.parse_range(data, piece.block_id, piece.start, piece.stop)
        return rows

    def tokens(self, numbers: list[int], rows: list[list[dict[str, Any]]]) -> list[TokenChunk]:
        """The tokens of chunks with these rows."""
        if self._chat is not None or self._blocks.manifest.header.token_column is not None:
            return [self._special(number, mine) for number, mine in zip(numbers, rows, strict=True)]
        with self._timings.of("tokenise"):
            texts = [text for mine in rows for text in self._blocks.texts_of(mine)]
            encoded = self._tokenizer.encode(texts, np.dtype(self._header.dtype))
        chunks = []
        first = 0
        for mine in rows:
            offsets = encoded.offsets[first : first + len(mine) + 1]
            chunks.append(TokenChunk(encoded.ids[offsets[0] : offsets[-1]], offsets - offsets[0]))
            first += len(mine)
        return chunks

    def _special(self, number: int, rows: list[dict[str, Any]]) -> TokenChunk:
        """The tokens of chats, or of what came tokenised."""
        start = number * self._header.chunk_size
        if self._chat is not None:
            with self._timings.of("tokenise"):
                encoded = self._encode_chats(self._chat, self._chats(rows, start), start)
                return TokenChunk(encoded.ids, encoded.offsets)
        ids, offsets = self._blocks.tokens_of(rows)
        foreign = np.flatnonzero(ids >= self._header.vocab_size)
        if len(foreign):
            sample_id = start + int(np.searchsorted(offsets, foreign[0], side="right")) - 1
            raise ConfigError(
                f"sample {sample_id} holds token {ids[foreign[0]]}, the tokenizer has {self._header.vocab_size}: "
                "name the tokenizer that this data set was made with"
            )
        return TokenChunk(ids.astype(np.dtype(self._header.dtype)), offsets)

    def _encode_chats(self, chat: ChatFormat, chats: list[list[dict[str, str]]], start: int) -> Encoded:
        try:
            return chat.encode(chats)
        except ConfigError:
            for place, messages in enumerate(chats):  # which of them it is
                try:
                    chat.encode([messages])
                except ConfigError as error:
                    raise ConfigError(f"sample {start + place} of {self._blocks.dataset_path}: {error}") from error
            raise

    def _chats(self, rows: list[dict[str, Any]], start: int) -> list[list[dict[str, str]]]:
        from penstock.sources.columns import messages_of

        column = self._blocks.manifest.header.text_column or ""
        chats = []
        for place, row in enumerate(rows):
            try:
                chats.append(messages_of(row, column))
            except SourceError as error:
                raise ConfigError(f"sample {start + place} of {self._blocks.dataset_path}: {error}") from error
        return chats

"""The token cache: a data set's tokens on disk, built as they are needed or ahead, read at memory speed.

    <data set>/tokens/<tokenizer>/
      header.json    the data set and the tokenizer it belongs to, chunk size, type of its numbers
      index.bin, segments/, locks    see `token_store`

Deleting it loses nothing: it never holds the only copy of anything. The processes of a machine share one: a chunk is
tokenised by whoever needs it first, and others who need it meanwhile tokenise the next.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from penstock.blocks import BlockManager, cache_folder
from penstock.errors import ConfigError, StorageError
from penstock.feed.buffers import Buffers
from penstock.feed.chunk_texts import ChunkTexts, TokenCacheHeader
from penstock.feed.prefetch import Soon
from penstock.feed.ranges import BlockRanges
from penstock.feed.timings import Timings
from penstock.feed.token_store import TokenChunk, TokenStore
from penstock.storage import LocalStorage

if TYPE_CHECKING:
    from penstock.feed.chat import ChatFormat
    from penstock.feed.known_tokenizer import KnownTokenizer
    from penstock.feed.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""How much text lies and is read together, by the data set's mean."""
CHUNK_SAMPLES = 10_000
"""And how many samples at most: a row costs more in memory than its few bytes on disk."""
_VERSION = 1
_CHUNKS_TOGETHER = 16
_SAMPLES_TOGETHER = 40_000
"""What is tokenised at a time: more takes more memory, less leaves cores idle."""
_CHUNKS_HELD = 128
"""How many that were just made may stay in memory: of more, as an order over all of a data set asks for, those that are
on disk are read from there."""
_BUSY_POLL_S = 0.01
_BUSY_TIMEOUT_S = 600.0


def chunk_samples(blocks: BlockManager, ranges: BlockRanges) -> int:
    """Samples of a chunk: about `CHUNK_BYTES` of text; a function of the data set alone, since orders depend on it."""
    size = sum(block.size_bytes for block in blocks.manifest.blocks) / max(1, ranges.total_samples)
    return max(1, min(round(CHUNK_BYTES / max(1.0, size)), CHUNK_SAMPLES, max(1, ranges.total_samples)))


class _Opened(NamedTuple):
    header: TokenCacheHeader
    store: TokenStore | None
    texts: ChunkTexts
    pid: int


class _Making(NamedTuple):
    """Chunks in the making."""

    there: dict[int, TokenChunk]
    """Those that turned out to be there."""
    numbers: list[int]
    """The others,"""
    rows: Soon[list[list[dict[str, Any]]]]
    """whose rows are being read."""
    held: ExitStack
    """The right to make them, which keeps others from doing the same."""


class TokenCache:
    """Tokens of a data set under one tokenizer. Safe for threads and processes; constructing does no I/O."""

    def __init__(
        self,
        blocks: BlockManager,
        tokenizer: Tokenizer | KnownTokenizer,
        *,
        chat: ChatFormat | None = None,
        folder: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Remember what to tokenise, and with what.

        Args:
            blocks: The data set; complete.
            tokenizer: For a data set that came tokenised, the one it was made with.
            chat: Given, samples are chats, and all but the assistant's turns is marked as not to be learned.
            folder: Where the cache is; beside the data set, or in the cache folder where that cannot be written.
            max_bytes: How much disk it may take, by segments of 256 MB; those used longest ago go first.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes} holds no token: expected 1 or more")
        self.blocks = blocks
        self.tokenizer = tokenizer
        self.chat = chat
        self.max_bytes = max_bytes
        self._folder = Path(folder) if folder is not None else None
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._told = False
        self.timings = Timings()
        self.buffers = Buffers()

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.blocks, self.tokenizer, self.chat, self._folder, self.max_bytes)

    @property
    def folder(self) -> Path | None:
        """Where it is; None where no folder can be written, and everything is tokenised anew each time."""
        store = self._open().store
        return store.folder if store else None

    @property
    def masked(self) -> bool:
        """Whether tokens carry a mark where they are not to be learned."""
        return self.chat is not None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._open().header.dtype)

    @property
    def chunk_size(self) -> int:
        return self._open().header.chunk_size

    @property
    def chunk_count(self) -> int:
        header = self._open().header
        return -(-header.total_samples // header.chunk_size)

    def chunks(self, numbers: Iterable[int]) -> list[TokenChunk]:
        """These chunks' tokens, in this order; those that are not there are made first, shared with other processes."""
        wanted = list(numbers)
        found: dict[int, TokenChunk] = {}
        store = self._open().store
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        hold = len(wanted) <= _CHUNKS_HELD
        while True:
            count = len(found)
            if store is not None:
                with self.timings.of("fetch"):
                    read = ((number, store.get(number)) for number in wanted if number not in found)
                    found |= {number: chunk for number, chunk in read if chunk is not None}
            missing = [number for number in wanted if number not in found]
            if not missing:
                return [found[number] for number in wanted]
            made = self._make_all(missing, hold=hold)
            found |= {number: chunk for number, chunk in made.items() if chunk is not None}
            hold = True  # what is not there any more when all are made will not stay, either
            if made or len(found) > count:  # time runs while nothing comes: all of a large data set takes hours
                deadline = time.monotonic() + _BUSY_TIMEOUT_S
            if not made:  # others are at all of them
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{self.folder}: chunk {missing[0]} has been in the making elsewhere for "
                        f"{_BUSY_TIMEOUT_S:.0f} s: see whether a process is stuck"
                    )
                time.sleep(_BUSY_POLL_S)

    @property
    def at_hand(self) -> bool:
        """Whether every chunk was seen to be there: reading them takes a copy, and no work."""
        store = self._open().store
        return store is not None and store.all_whole

    def will_need(self, numbers: Callable[[], np.ndarray]) -> None:
        """Let the system read these chunks ahead."""
        store = self._open().store
        if store is not None:
            store.will_need(numbers)

    def let_go(self, numbers: np.ndarray, *, again: bool) -> None:
        """These chunks were used for now: they are not to count as this process's memory any longer.

        Args:
            numbers: Which.
            again: They will be used again soon, so that some of them stay.
        """
        store = self._open().store
        if store is not None:
            store.let_go(numbers, again=again)

    def token_counts(self) -> np.ndarray:
        """Tokens of each chunk; -1 for those not tokenised yet."""
        store = self._open().store
        return store.token_counts() if store else np.full(self.chunk_count, -1, dtype=np.int64)

    def build(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Tokenise whatever is not there yet. `on_progress` gets (chunks done, chunks in all)."""
        store = self._open().store
        if store is None:
            raise StorageError("the token cache has no folder that can be written: name one")
        missing = np.flatnonzero(self.token_counts() < 0).tolist()
        done = self.chunk_count - len(missing)
        for first in range(0, len(missing), _CHUNKS_TOGETHER):
            numbers = missing[first : first + _CHUNKS_TOGETHER]
            self.chunks(numbers)
            done += len(numbers)
            if on_progress is not None:
                on_progress(done, self.chunk_count)

    def close(self) -> None:
        """Let go of the files; used again, it opens them again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened.store is not None:
            opened.store.close()

    # -- making --------------------------------------------------------------------------------------------------------

    def _make_all(self, numbers: list[int], *, hold: bool) -> dict[int, TokenChunk | None]:
        """Tokenise chunks, but for those that another thread or process is at. Several at a time, since engines work on
        all cores only where there is much to do; the rows of the next are read meanwhile.

        Args:
            numbers: Which.
            hold: Whether they stay in memory; else None stands for each that is on disk.
        """
        made: dict[int, TokenChunk | None] = {}
        begun: deque[_Making] = deque()
        together = max(1, min(_CHUNKS_TOGETHER, _SAMPLES_TOGETHER // self.chunk_size))
        try:
            for first in range(0, len(numbers), together):
                begun.append(self._begin(numbers[first : first + together]))
                if len(begun) > 1:
                    made |= self._finish(begun.popleft(), hold=hold)
            while begun:
                made |= self._finish(begun.popleft(), hold=hold)
            return made
        finally:
            for left in begun:
                left.held.close()

    def _begin(self, numbers: list[int]) -> _Making:
        state = self._open()
        there: dict[int, TokenChunk] = {}
        mine = []
        with ExitStack() as held:
            for number in numbers:
                if state.store is not None and not held.enter_context(state.store.making(number)):
                    continue
                found = state.store.get(number) if state.store is not None else None
                if found is not None:  # made while we came here
                    there[number] = found
                else:
                    mine.append(number)
            rows = Soon(lambda: [state.texts.rows(number) for number in mine])
            return _Making(there, mine, rows, held.pop_all())

    def _finish(self, making: _Making, *, hold: bool) -> Mapping[int, TokenChunk | None]:
        with making.held:
            state = self._open()
            made = state.texts.tokens(making.numbers, making.rows.result())
            found = dict(zip(making.numbers, made, strict=True))
            kept = self._keep(state.store, found)
            if kept and not hold:
                return dict.fromkeys([*making.there, *found])
            return making.there | found

    def _keep(self, store: TokenStore | None, chunks: dict[int, TokenChunk]) -> bool:
        """Says whether they are on disk."""
        if store is None:
            return False
        try:
            store.put_all(chunks.items())
        except OSError as error:
            if not self._told:
                _log.warning("%s: tokens are not kept: %s", store.folder, error.strerror or error)
                self._told = True
            return False
        return True

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self) -> _Opened:
        with self._lock:
            if self._opened is None or self._opened.pid != os.getpid():  # locks do not come along when forked
                ranges = BlockRanges(self.blocks)
                header = self._header(ranges)
                count = -(-header.total_samples // header.chunk_size)
                texts = ChunkTexts(self.blocks, ranges, self.tokenizer, self.chat, header, self.timings)
                self._opened = _Opened(header, self._open_store(header, count), texts, os.getpid())
            return self._opened

    def _header(self, ranges: BlockRanges) -> TokenCacheHeader:
        vocab_size = self.tokenizer.vocab_size
        return TokenCacheHeader(
            version=_VERSION,
            fingerprint=self.blocks.manifest.fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            dtype="<u2" if vocab_size <= 1 << 16 and not self.masked else "<u4",
            vocab_size=vocab_size,
            chunk_size=chunk_samples(self.blocks, ranges),
            total_samples=ranges.total_samples,
            chat_fingerprint=self.chat.fingerprint if self.chat else None,
        )

    def _open_store(self, header: TokenCacheHeader, count: int) -> TokenStore | None:
        parts = [header.tokenizer_fingerprint, header.fingerprint]
        parts += [header.chat_fingerprint] if header.chat_fingerprint else []
        name = "-".join([*(part.removeprefix("sha256:")[:16] for part in parts), str(header.chunk_size)])
        beside = self.blocks.store_path
        folders = [self._folder] if self._folder else []
        if not folders:
            folders = [root / "tokens" / name for root in (beside, cache_folder()) if root is not None]
        problem: OSError | StorageError | None = None
        for folder in folders:
            try:
                self._settle(LocalStorage(folder), header)
                store = TokenStore(folder, chunk_count=count, dtype=np.dtype(header.dtype), max_bytes=self.max_bytes)
                if store.read_only and folder is not folders[-1] and (store.token_counts() < 0).any():
                    continue  # what is missing could not be kept there
                return store
            except (OSError, StorageError) as error:
                problem = error
        if self._folder is not None and problem is not None:
            raise StorageError(f"{self._folder}: the token cache cannot be kept there: {problem}") from problem
        _log.warning("no token cache: %s; everything is tokenised anew each time", problem)
        return None

    @staticmethod
    def _settle(storage: LocalStorage, header: TokenCacheHeader) -> None:
        wanted = {name: value for name, value in header._asdict().items() if value is not None}
        if storage.exists("header.json"):
            try:
                found = orjson.loads(storage.get("header.json"))
            except orjson.JSONDecodeError:
                found = None
            if found == wanted:
                return
            raise ConfigError(
                f"{storage.url} is the token cache of other data or of another tokenizer: choose another folder, "
                "or delete it"
            )
        storage.put("header.json", orjson.dumps(wanted))


def _rebuild(
    blocks: BlockManager,
    tokenizer: Tokenizer | KnownTokenizer,
    chat: ChatFormat | None,
    folder: Path | None,
    max_bytes: int | None,
) -> TokenCache:
    return TokenCache(blocks, tokenizer, chat=chat, folder=folder, max_bytes=max_bytes)

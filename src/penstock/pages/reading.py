"""The texts of a page: which bytes they take, fetched by ranges, and decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import BadRowError
from penstock.pages.catalog import Part, Shard
from penstock.pages.choice import Page
from penstock.pages.data_pages import TakenPages, Texts, decode, fetched, must_spell_out, take_pages
from penstock.pages.dataset import PagedDataset
from penstock.pages.footers import ColumnFacts
from penstock.pages.requests import Requests
from penstock.storage import ObjectInfo

_GAP_BYTES = 512 << 10
"""So much between two chunks is read along: it costs less than another request."""
_PAGE_BYTES = 1 << 20
"""What a data page holds at most, mostly."""
_HEADER_BYTES = 4 << 10
_WORTH_SPELLING_OUT = 2
"""Up to so many times what a dictionary and its use take, its entries are spelled out row by row: most texts are there
once."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Some rows of one row group."""

    group: int
    start: int
    size: int
    raw_size: int
    has_dictionary: bool
    text_size: int
    spells_out: bool
    rows: int
    first: int
    last: int

    @property
    def raw_bytes(self) -> int:
        """Bytes of the wanted rows as they are stored, when decompressed; about."""
        return self.raw_size * (self.last - self.first) // max(1, self.rows)

    def text_bytes(self, growth: float | None) -> int:
        """Bytes of the wanted texts; about. Where a dictionary holds each text once and nobody says how often it is
        used, `growth` is how much more than that came of it elsewhere, and without it each row may be all of it."""
        wanted = self.last - self.first
        if self.text_size:
            return self.text_size * wanted // max(1, self.rows)
        if not self.has_dictionary:
            return self.raw_bytes
        most = self.raw_size * wanted
        return most if growth is None else min(most, int(self.raw_bytes * growth))

    def memory_bytes(self, buffer_bytes: int, growth: float | None) -> int:
        """About how much reading it takes: what is decompressed, that as Arrow, the texts as Python has them, and as
        tokens. Of a chunk with a dictionary that is mostly all of it, and each text once, but for the tokens."""
        raw, texts = self.raw_bytes, self.text_bytes(growth)
        whole = self.has_dictionary and self.size <= buffer_bytes
        decoded = self.raw_size if whole else min(self.raw_size, raw + 2 * _PAGE_BYTES)
        if self.has_dictionary and self.spells_out:
            decoded = max(decoded, self.text_size or int(self.raw_size * (growth or self.rows)))
        if not self.has_dictionary:
            return 2 * decoded + 2 * texts
        return 2 * decoded + min(texts, decoded) + 2 * texts


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks of one shard that are fetched together; or one that is too large to be fetched whole."""

    chunks: tuple[_Wanted, ...]
    whole: bool

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def stop(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A page's rows in one shard."""

    shard: Shard
    info: ObjectInfo
    facts: ColumnFacts
    runs: tuple[_Run, ...]
    first_row: int


@dataclass(frozen=True, slots=True)
class PageSource:
    """What it takes to read a page."""

    page: Page
    pieces: tuple[_Piece, ...]
    size_bytes: int
    """About how much memory that takes, text and all."""
    text_bytes: int
    """Of that, the texts."""


class PageReader:
    """Reads pages of a data set, each shard as it was when this reader first looked at it. Safe for threads."""

    def __init__(self, dataset: PagedDataset, *, text_column: str | None, buffer_bytes: int) -> None:
        self._dataset = dataset
        self._text_column = text_column
        self._buffer_bytes = max(1, buffer_bytes)
        self._infos: dict[str, ObjectInfo] = {}
        self._growth: float | None = None
        """The most that texts have grown so far, of chunks with a dictionary that do not say how large they are."""

    def info(self, shard: Shard) -> ObjectInfo:
        """Size and version of a shard, as this reader first saw it."""
        found = self._infos.get(shard.path)
        return found if found is not None else self._infos.setdefault(shard.path, self._dataset.info(shard))

    def _facts(self, shard: Shard) -> tuple[ObjectInfo, ColumnFacts]:
        info = self.info(shard)
        return info, self._dataset.facts(shard, self._text_column, info)

    def locate(self, page: Page, part: Part, requests: Requests) -> PageSource:
        """Find out where a page lies; asks for the footers that are not known yet."""
        shards = part.pieces(page.first_row, page.first_row + page.row_count)
        jobs = [lambda shard=shard: self._facts(shard) for shard, _, _ in shards]
        pieces, size, text_bytes = [], 0, 0
        for (shard, first, last), (info, facts) in zip(shards, requests.all_of(jobs), strict=True):
            runs = self._runs([_wanted(facts, *found) for found in facts.pieces(first, last)])
            pieces.append(_Piece(shard, info, facts, runs, first))
            for run in runs:
                size += run.stop - run.start if run.whole else 2 * self._buffer_bytes
                size += sum(chunk.memory_bytes(self._buffer_bytes, self._growth) for chunk in run.chunks)
                text_bytes += sum(chunk.text_bytes(self._growth) for chunk in run.chunks)
        return PageSource(page, tuple(pieces), size, text_bytes)

    def texts(self, source: PageSource, requests: Requests) -> Texts:
        """The page's texts in order. Exactly as many as the page has rows."""
        jobs: list[Callable[[], list[TakenPages]]] = [
            lambda piece=piece, run=run: self._take(piece, run) for piece in source.pieces for run in piece.runs
        ]
        taken = iter(requests.all_of(jobs))
        texts: list[str | None] = []
        size = 0
        for piece in source.pieces:
            pages, codecs = [], []
            for run in piece.runs:
                pages += next(taken)
                codecs += [piece.facts.codecs[int(piece.facts.groups[chunk.group, 4])] for chunk in run.chunks]
            spell_out = all(chunk.spells_out for run in piece.runs for chunk in run.chunks)
            found = decode(pages, codecs, piece.facts.levels, self._what(piece), spell_out=spell_out)
            texts += found.rows
            size += found.size_bytes
            self._learn(piece, found.size_bytes)
        return Texts(texts, size)

    def _learn(self, piece: _Piece, size_bytes: int) -> None:
        chunks = [chunk for run in piece.runs for chunk in run.chunks]
        if any(chunk.has_dictionary and not chunk.text_size for chunk in chunks):
            growth = size_bytes / max(1, sum(chunk.raw_bytes for chunk in chunks))
            self._growth = max(1.0, self._growth or 1.0, growth)

    def refuse_textless(self, source: PageSource, place: int) -> BadRowError:
        """The error for a row of a page that has no text."""
        for piece in source.pieces:
            count = sum(chunk.last - chunk.first for run in piece.runs for chunk in run.chunks)
            if place < count:
                return BadRowError(
                    f"{self._dataset.where}/{piece.shard.path}: row {piece.first_row + place} (counted from 0) has no "
                    f"text in column {piece.facts.column!r}: mend it, or pass on_bad_row='skip' to leave such rows out"
                )
            place -= count
        raise AssertionError("the place is in the page")

    def _runs(self, chunks: list[_Wanted]) -> tuple[_Run, ...]:
        """Put neighbours together, so that many small row groups are few requests."""
        runs: list[list[_Wanted]] = []
        for chunk in chunks:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and 0 <= chunk.start - (last.start + last.size) <= _GAP_BYTES
                and chunk.start + chunk.size - runs[-1][0].start <= self._buffer_bytes
            ):
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        return tuple(
            _Run(tuple(run), run[-1].start + run[-1].size - run[0].start <= self._buffer_bytes) for run in runs
        )

    def _take(self, piece: _Piece, run: _Run) -> list[TakenPages]:
        info = piece.info
        what = self._what(piece)
        if not run.whole:
            chunk = run.chunks[0]
            told = f"{what}, row group {chunk.group}"
            give = _Window(lambda start, stop: self._dataset.read(info, start, stop), chunk, self._buffer_bytes)
            with self._dataset.page_places(info, piece.facts, chunk.group) as places:
                places.walk(give.ahead, chunk.size, chunk.last, told)
                found = places.find(chunk.first, chunk.last, told)
            return [fetched(give.exactly, found, told)]
        data = memoryview(self._dataset.read(info, run.start, run.stop))
        taken = []
        for chunk in run.chunks:
            own = data[chunk.start - run.start : chunk.start - run.start + chunk.size]
            taken.append(
                take_pages(
                    lambda at, size, own=own: own[at : at + size],
                    chunk.size,
                    chunk.first,
                    chunk.last,
                    f"{what}, row group {chunk.group}",
                )
            )
        return taken

    def _what(self, piece: _Piece) -> str:
        return f"{self._dataset.where}/{piece.shard.path}, column {piece.facts.column!r}"


class _Window:
    """A large column chunk, of which a part at a time is in memory."""

    def __init__(self, read: Callable[[int, int], bytes], chunk: _Wanted, buffer_bytes: int) -> None:
        self._read = read
        self._chunk = chunk
        self._buffer_bytes = buffer_bytes
        self._held = memoryview(b"")
        self._from = 0

    def ahead(self, at: int, size: int) -> memoryview:
        """For whoever walks on: a whole buffer at a time, or where one jumps further than that, only what is asked."""
        place = at - self._from
        if not 0 <= place <= place + size <= len(self._held):
            jumps = place >= len(self._held) + self._buffer_bytes // 4
            self._hold(at, at + max(size, _HEADER_BYTES if jumps else self._buffer_bytes))
            place = 0
        return self._held[place:]

    def exactly(self, at: int, size: int) -> memoryview:
        """For whoever knows what is needed."""
        place = at - self._from
        if not 0 <= place <= place + size <= len(self._held):
            return self._fetch(at, at + size)
        return self._held[place:]

    def _hold(self, at: int, stop: int) -> None:
        stop = min(stop, self._chunk.size)
        self._held = memoryview(b"")
        self._held = self._fetch(at, stop)
        self._from = at

    def _fetch(self, at: int, stop: int) -> memoryview:
        """Bytes of the chunk, no more than a buffer's at a time."""
        start = self._chunk.start
        if stop - at <= self._buffer_bytes:
            return memoryview(self._read(start + at, start + stop))
        found = bytearray(stop - at)
        for first in range(0, len(found), self._buffer_bytes):
            last = min(first + self._buffer_bytes, len(found))
            found[first:last] = self._read(start + at + first, start + at + last)
        return memoryview(found)


def _wanted(facts: ColumnFacts, group: int, first: int, last: int) -> _Wanted:
    end, start, size, raw_size, *_, has_dictionary, text_size = facts.groups[group].tolist()
    before = int(facts.groups[group - 1, 0]) if group else 0
    spelled = must_spell_out(facts.levels) or 0 < text_size <= _WORTH_SPELLING_OUT * raw_size
    return _Wanted(group, start, size, raw_size, bool(has_dictionary), text_size, spelled, end - before, first, last)

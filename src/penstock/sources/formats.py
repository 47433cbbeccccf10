"""Which reader reads which file: by suffix, through compression and archives."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from penstock.errors import ConfigError, SourceError
from penstock.sources.archives import Members, read_tar, read_zip
from penstock.sources.base import Cursor, RowBatch
from penstock.sources.columnar import read_arrow, read_parquet
from penstock.sources.delimited import read_csv, read_tsv
from penstock.sources.json_values import read_json
from penstock.sources.jsonl import read_jsonl
from penstock.sources.streams import CODECS, DAMAGE, decompressed, go_to, transcoded
from penstock.sources.text import read_text_file, read_text_lines
from penstock.sources.tokens import TokenOptions, read_bin, read_npy

_SPOOL_BYTES = 64 << 20
"""A compressed file that must be read out of order is unpacked: up to this size in memory, beyond it on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the user says about how files are read; part of a data set's identity."""

    encoding: str | None = None
    """Encoding of text files, by any of its names; UTF-8 where not given, and then what is not UTF-8 is a bad row."""
    whole_files: bool = False
    """Whether a .txt file is one sample instead of one a line."""
    tokens_per_sample: int | None = None
    """How many tokens of a flat file of tokens make a sample; see `TokenOptions`."""
    token_dtype: str | None = None
    """What numbers a file of raw tokens holds; see `TokenOptions`."""

    @property
    def tokens(self) -> TokenOptions:
        return TokenOptions(tokens_per_sample=self.tokens_per_sample, token_dtype=self.token_dtype)

    def __post_init__(self) -> None:
        _ = self.tokens  # checks them
        if self.encoding is None:
            return
        try:
            "a".encode(self.encoding)  # knows text encodings only, while the codecs module has others
            name = codecs.lookup(self.encoding).name
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"encoding={self.encoding!r} is unknown: expected a name such as utf-16 or latin-1"
            ) from error
        object.__setattr__(self, "encoding", None if name == "utf-8" else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How files of one kind are read."""

    read: Callable[[BinaryIO, str, Cursor], Iterator[RowBatch]] | None = None
    read_tokens: Callable[[BinaryIO, str, Cursor, TokenOptions], Iterator[RowBatch]] | None = None
    """The same for files of tokens, which do not say all of what they are."""
    from_offset: bool = False
    """Whether the reader wants its stream at the cursor's byte offset; others find their place themselves."""
    is_text: bool = True
    """Whether `encoding` applies."""
    random_access: bool = False
    """Whether the reader jumps about in the file."""


_LINES = Format(read=read_text_lines, from_offset=True)
_WHOLE = Format(read=read_text_file)
_JSONL = Format(read=read_jsonl, from_offset=True)

FORMATS: dict[str, Format] = {
    ".arrow": Format(read=read_arrow, is_text=False, random_access=True),
    ".bin": Format(read_tokens=read_bin, is_text=False),
    ".csv": Format(read=read_csv),
    ".json": Format(read=read_json),
    ".jsonl": _JSONL,
    ".md": _WHOLE,
    ".ndjson": _JSONL,
    ".npy": Format(read_tokens=read_npy, is_text=False),
    ".parquet": Format(read=read_parquet, is_text=False, random_access=True),
    ".py": _WHOLE,
    ".rst": _WHOLE,
    ".tsv": Format(read=read_tsv),
    ".txt": _LINES,
}
ARCHIVES = (".tar", ".zip")
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}


def suffixes_of(name: str) -> tuple[str, str]:
    """The suffix that tells a file's format, and that of its compression or nothing: ``a.jsonl.gz`` is .jsonl, .gz."""
    path = PurePosixPath(name.lower())
    short = _SHORT.get(path.suffix)
    if short:
        path = path.with_suffix(short)
    codec = path.suffix if path.suffix in CODECS else ""
    return (PurePosixPath(path.stem).suffix, codec) if codec else (path.suffix, "")


def can_read(name: str) -> bool:
    suffix, _ = suffixes_of(name)
    return suffix in FORMATS or suffix in ARCHIVES


def refuse_unknown(name: str) -> None:
    """Name a file nobody can read, and what could be."""
    if not can_read(name):
        suffix, _ = suffixes_of(name)
        known = ", ".join(sorted([*FORMATS, *ARCHIVES]))
        raise SourceError(
            f"{name}: no reader for {suffix or 'a file without suffix'!r}: expected one of {known}, "
            f"also with {', '.join(sorted(CODECS))}"
        )


def reads_about(name: str) -> bool:
    """Whether a file is read in another order than its own."""
    suffix, codec = suffixes_of(name)
    return not codec and (suffix == ".zip" or (suffix in FORMATS and FORMATS[suffix].random_access))


def read_file(file: BinaryIO, name: str, start: Cursor, options: ReadOptions) -> Iterator[RowBatch]:
    """Rows of one file from a cursor on, given its bytes from the very start."""
    try:
        yield from _read(file, name, start, options)
    except SourceError as error:
        if name in str(error):
            raise
        raise SourceError(f"{name}: {error}") from error
    except DAMAGE as error:
        raise SourceError(
            f"{name}: cannot be read to its end: {error or type(error).__name__}: it is damaged or truncated"
        ) from error


def _read(file: BinaryIO, name: str, start: Cursor, options: ReadOptions) -> Iterator[RowBatch]:
    suffix, codec = suffixes_of(name)
    stream = decompressed(file, codec) if codec else file
    if suffix in ARCHIVES:
        read_archive = read_zip if suffix == ".zip" else read_tar
        stream = _seekable(stream) if suffix == ".zip" else stream

        def read_member(member: BinaryIO, inner: str, at: Cursor) -> Iterator[RowBatch]:
            return read_file(member, inner, at, options)

        yield from read_archive(stream, name, start, Members(name, _is_readable_member), read_member)
        return
    form = FORMATS[suffix]
    if options.whole_files and form is _LINES:
        form = _WHOLE
    if form.random_access:
        stream = _seekable(stream)
    if options.encoding and form.is_text:
        stream = transcoded(stream, options.encoding)
    if form.from_offset:
        go_to(stream, start.offset)
    if form.read_tokens is not None:
        yield from form.read_tokens(stream, name, replace(start, skip=0), options.tokens)
    elif form.read is not None:
        yield from form.read(stream, name, replace(start, skip=0))


def _is_readable_member(name: str) -> bool:
    return suffixes_of(name)[0] in FORMATS


def _seekable(stream: BinaryIO) -> BinaryIO:
    if stream.seekable():
        return stream
    spool = SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - closed with the last reference, and never named
    while data := stream.read(io.DEFAULT_BUFFER_SIZE * 64):
        spool.write(data)
    spool.seek(0)
    return cast(BinaryIO, spool)

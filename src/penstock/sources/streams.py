"""Bytes of a file as its format wants them: decompressed, in UTF-8, from any place on."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from penstock.errors import PenstockError, SourceError

BUFFER_BYTES = 1 << 20

CODECS = frozenset({".bz2", ".gz", ".xz", ".zst"})
"""Suffixes of compressed files; what is inside goes by the suffix before."""

DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""What reading a damaged or truncated file raises."""

FAILURES = (*DAMAGE, PenstockError)
"""What ends the reading of a file early; a reader hands out the rows it has before it lets one pass."""

_PIECE_BYTES = 1 << 16
"""How much is unpacked at a time: what comes before a damage is handed out, but for the last piece."""


_WHOLE_BYTES = 16 << 20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Raw(io.RawIOBase):
    """Anything with `read` as a raw stream, so that Python's own buffered reader can cut it into lines."""

    def __init__(self, inner: _Readable) -> None:
        self._read = read_some(inner)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self._read(min(len(buffer), _PIECE_BYTES))
        buffer[: len(data)] = data
        return len(data)


class _Unpacked:
    """A bz2 or xz file. Python's own readers take a damaged second stream for the end of the file."""

    def __init__(self, inner: BinaryIO, begin: Callable[[], Any]) -> None:
        self._inner = inner
        self._begin = begin
        self._decompressor = begin()

    def read(self, size: int, /) -> bytes:
        while True:
            packed = b""
            if self._decompressor.eof:
                packed = self._next_stream()
                if not packed:
                    return b""
                self._decompressor = self._begin()
            elif self._decompressor.needs_input:
                packed = self._inner.read(_PIECE_BYTES)
                if not packed:
                    raise EOFError("it ends in the middle")
            data = self._decompressor.decompress(packed, size)
            if data:
                return data

    def _next_stream(self) -> bytes:
        """The beginning of the next stream, behind padding; nothing where there is none."""
        packed = self._decompressor.unused_data.lstrip(b"\0")
        while not packed:
            more = self._inner.read(_PIECE_BYTES)
            if not more:
                break
            packed = more.lstrip(b"\0")
        return packed


class _NotEmpty:
    """A compressed file. One of no bytes was cut off, though some readers take it for one of no rows."""

    def __init__(self, inner: BinaryIO) -> None:
        self._read = read_some(inner)
        self._began = False

    def read(self, size: int, /) -> bytes:
        data = self._read(size)
        if not data and not self._began:
            raise EOFError("it is empty, which no compressed file is")
        self._began = True
        return data


class _Transcoded:
    """A stream of another encoding, as UTF-8."""

    def __init__(self, inner: BinaryIO, encoding: str) -> None:
        self._read = read_some(inner)
        self._decoder = codecs.getincrementaldecoder(encoding)("strict")
        self._encoding = encoding
        self._left = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._left:
            data = self._read(_PIECE_BYTES)
            try:
                self._left = memoryview(self._decoder.decode(data, final=not data).encode("utf-8"))
            except UnicodeError as error:
                reason = getattr(error, "reason", error)
                raise SourceError(f"not {self._encoding}: {reason}: name its encoding with --encoding") from error
            if not data:
                break
        piece, self._left = self._left[:size], self._left[size:]
        return bytes(piece)


def read_some(file: _Readable) -> Callable[[int], bytes]:
    """A way to read what is there, up to a size: one that waits for all of it loses what came before a failure."""
    return getattr(file, "read1", file.read)


def decompressed(file: BinaryIO, codec: str) -> BinaryIO:
    """What a compressed stream holds; several members one after the other are one stream."""
    file = unseekable(_NotEmpty(file))
    if codec == ".gz":
        return unseekable(gzip.GzipFile(fileobj=file, mode="rb"))
    if codec == ".bz2":
        return unseekable(_Unpacked(file, bz2.BZ2Decompressor))
    if codec == ".xz":
        return unseekable(_Unpacked(file, lzma.LZMADecompressor))
    import pyarrow

    return unseekable(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))


def unseekable(file: _Readable) -> BinaryIO:
    """A stream that is read from start to end, whatever it says of itself."""
    return io.BufferedReader(_Raw(file), BUFFER_BYTES)


def transcoded(file: BinaryIO, encoding: str) -> BinaryIO:
    """A stream as UTF-8, whatever its encoding."""
    return unseekable(_Transcoded(file, encoding))


def go_to(file: BinaryIO, offset: int, given: int = 0) -> None:
    """Go to a byte offset from the start of a stream: by seeking where it can, else by reading up to there; then
    `given` says how many bytes were read already."""
    if file.seekable():
        file.seek(offset)
        return
    left = offset - given
    while left:
        data = file.read(min(left, BUFFER_BYTES))
        if not data:
            raise SourceError(f"ended {left} bytes before the place to continue from: the file has changed")
        left -= len(data)


def read_whole(file: BinaryIO, size: int) -> bytes:
    """So many bytes, fewer only at the end of the stream. Takes memory for what is there, whatever was asked for."""
    pieces = []
    while size > 0 and (data := file.read(min(size, _WHOLE_BYTES))):
        pieces.append(data)
        size -= len(data)
    return b"".join(pieces)

"""Bytes of a file as its format wants them: decompressed, in UTF-8, from any place on."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from typing import BinaryIO, Protocol

from penstock.errors import SourceError

BUFFER_BYTES = 1 << 20

CODECS = frozenset({".bz2", ".gz", ".xz", ".zst"})
"""Suffixes of compressed files; what is inside goes by the suffix before."""

DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What reading a damaged or truncated compressed file raises."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Raw(io.RawIOBase):
    """Anything with `read` as a raw stream, so that Python's own buffered reader can cut it into lines."""

    def __init__(self, inner: _Readable) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Transcoded:
    """A stream of another encoding, as UTF-8."""

    def __init__(self, inner: BinaryIO, encoding: str) -> None:
        self._inner = inner
        self._decoder = codecs.getincrementaldecoder(encoding)("strict")
        self._encoding = encoding
        self._left = b""

    def read(self, size: int, /) -> bytes:
        while not self._left:
            data = self._inner.read(BUFFER_BYTES)
            try:
                self._left = self._decoder.decode(data, final=not data).encode("utf-8")
            except UnicodeError as error:
                raise SourceError(f"not {self._encoding}: {error}: name its encoding with --encoding") from error
            if not data:
                break
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def decompressed(file: BinaryIO, codec: str) -> BinaryIO:
    """What a compressed stream holds; several members one after the other are one stream."""
    if codec == ".gz":
        inner: _Readable = gzip.GzipFile(fileobj=file, mode="rb")
    elif codec == ".bz2":
        inner = bz2.BZ2File(file)
    elif codec == ".xz":
        inner = lzma.open(file)  # noqa: SIM115 - closes nothing: the file below is its owner's
    else:
        import pyarrow

        inner = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return unseekable(inner)


def unseekable(file: _Readable) -> BinaryIO:
    """A stream that is read from start to end, whatever it says of itself."""
    return io.BufferedReader(_Raw(file), BUFFER_BYTES)


def transcoded(file: BinaryIO, encoding: str) -> BinaryIO:
    """A stream as UTF-8, whatever its encoding."""
    try:
        codecs.lookup(encoding)
    except LookupError as error:
        raise SourceError(f"--encoding {encoding} is unknown: expected a name such as utf-16 or latin-1") from error
    return unseekable(_Transcoded(file, encoding))


def advance(file: BinaryIO, offset: int) -> None:
    """Go to a byte offset from the start of a stream: by seeking where it can, else by reading up to there."""
    if not offset:
        return
    if file.seekable():
        file.seek(offset)
        return
    left = offset
    while left:
        data = file.read(min(left, BUFFER_BYTES))
        if not data:
            raise SourceError(f"ended {left} bytes before the place to continue from: the file has changed")
        left -= len(data)

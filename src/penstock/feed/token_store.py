"""Token chunks on disk: an index of fixed records, and segments that only grow.

    index.bin            32 bytes a chunk, by its number: where its payload is, its counts, its CRC; or zeros
    segments/00000000    payloads end to end: where each sample ends (uint32), then the ids; each at a multiple of 8
    locks                a byte a chunk, locked by whoever makes it

Every process appends to a segment of its own and then writes the chunk's record, so nothing is ever half visible. What
a crash or a power loss leaves behind is found by its CRC and made anew: this is a cache, and nothing here is synced.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from penstock.feed.token_segments import PIECE_BYTES, Payload, SegmentWriter, aligned, segment_path
from penstock.feed.unmapping import give_back
from penstock.feed.used_chunks import UsedChunks

_log = logging.getLogger(__name__)

_RECORD = np.dtype(
    [("offset", "<u8"), ("tokens", "<u8"), ("segment", "<u4"), ("samples", "<u4"), ("crc", "<u4"), ("check", "<u4")]
)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems of clusters say that were mounted without locks."""
_RECENT_BYTES = 32 << 20
_FAULT_BYTES = PIECE_BYTES
"""Whoever touches a page maps its piece, also where that is part of a neighbour that was let go of."""
MAPPED_BYTES = 512 << 20
"""Of what is used again and again, what stays mapped: to map it again takes a good part of the time of reading it."""


class TokenChunk(NamedTuple):
    """Consecutive samples' tokens, end to end; sample i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: np.ndarray
    offsets: np.ndarray
    mapped: np.ndarray | None = None
    """The bytes that the ids lie in, where that is a mapped file,"""
    at: int = 0
    """and where in them."""

    row_length: int = -1
    """The length of all its samples, 0 where they have none in common; -1 where nobody has looked."""

    @property
    def holder(self) -> np.ndarray:
        return self.ids.view(np.uint8) if self.mapped is None else self.mapped

    def common_length(self) -> int:
        """The length of all its samples; 0 where they have none in common."""
        if self.row_length >= 0:
            return self.row_length
        length = int(self.offsets[1]) if len(self.offsets) > 1 else 0
        return length if (self.offsets == np.arange(len(self.offsets)) * length).all() else 0


class TokenStore:
    """One cache folder, as one process sees it. Safe for threads."""

    def __init__(self, folder: Path, *, chunk_count: int, dtype: np.dtype, max_bytes: int | None) -> None:
        self.folder = folder
        self._chunk_count = chunk_count
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._making: set[int] = set()
        self._maps: dict[int, tuple[np.ndarray, mmap.mmap]] = {}
        self._inodes: dict[int, int] = {}
        """Of the segments that are mapped: another file may have the same name since."""
        self._recent_of: dict[int, set[int]] = {}
        """The recent chunks of each segment: they hold its mapping, which is a descriptor, and disk once deleted."""
        self._whole: set[tuple[int, int, int]] = set()
        """Payloads whose CRC was right: segment, offset, CRC. Once a process and payload is enough."""
        self._recent: OrderedDict[int, TokenChunk] = OrderedDict()
        self._recent_bytes = 0
        self._used = UsedChunks(MAPPED_BYTES)
        self._waits_for_disks = -1
        self._has_locks = True
        self._fds: set[int] = set()
        self._writer = SegmentWriter(folder / "segments", max_bytes, self._fds)
        # Not when the interpreter ends: threads are still at it, and the numbers may be those of other files by then.
        weakref.finalize(self, _close_all, self._fds).atexit = False
        size = max(1, chunk_count) * _RECORD.itemsize
        self.read_only = False
        try:
            (folder / "segments").mkdir(parents=True, exist_ok=True)
            self._index_fd = self._opened(folder / "index.bin", os.O_RDWR | os.O_CREAT)
            if os.fstat(self._index_fd).st_size < size:
                # Not a hole: where files are memory, a look at one takes room, and kills the process if there is none.
                os.posix_fallocate(self._index_fd, 0, size)
            self._lock_fd = self._opened(folder / "locks", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not self._is_there(size):
                raise
            self.read_only = True
            self._index_fd = self._lock_fd = self._opened(folder / "index.bin", os.O_RDONLY)
        self._records = np.memmap(folder / "index.bin", dtype=_RECORD, mode="r", shape=(max(1, chunk_count),)).view(
            np.ndarray
        )

    def _is_there(self, size: int) -> bool:
        """Whether it was made by somebody else, who may write it."""
        index = self.folder / "index.bin"
        return index.is_file() and index.stat().st_size >= size

    def close(self) -> None:
        with self._lock:
            for segment in {*self._maps, *self._recent_of}:
                self._forget(segment)
            _close_all(self._fds)
            self._index_fd = self._lock_fd = -1  # their numbers may be those of other files soon
            self._writer.end()

    def _opened(self, path: Path, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        self._fds.add(fd)
        return fd

    def get(self, number: int) -> TokenChunk | None:
        """A chunk as it was put, or None where it is not there or not whole."""
        self._used.discard(number)
        recent = self._recent.get(number)
        if recent is not None:
            return recent
        record = self._records[number]
        if record["check"] != _check(record):
            return None
        samples, tokens, start = int(record["samples"]), int(record["tokens"]), int(record["offset"])
        ids_at = aligned(4 * (samples + 1))
        stop = start + ids_at + tokens * self._dtype.itemsize
        data = self._segment(int(record["segment"]), stop)
        if data is None:
            return None
        payload = data[start:stop]
        told = int(record["segment"]), start, int(record["crc"])
        if told not in self._whole:
            if isal_zlib.crc32(payload) != told[2]:
                return self.get(number) if self._forget_deleted(told[0]) else None
            self._whole.add(told)
        offsets = payload[: 4 * (samples + 1)].view("<u4").astype(np.int64)
        chunk = TokenChunk(payload[ids_at:].view(self._dtype), offsets, data, start + ids_at)
        chunk = chunk._replace(row_length=chunk.common_length())
        self._remember(number, chunk, told[0])
        return chunk

    def _remember(self, number: int, chunk: TokenChunk, segment: int) -> None:
        """Keep what it cost to open a chunk: not its tokens, which stay in the file."""
        with self._lock:
            known = self._maps.get(segment)
            if known is None or known[0] is not chunk.mapped:
                return  # it was let go of meanwhile
            if number not in self._recent:
                self._recent[number] = chunk
                self._recent_bytes += chunk.offsets.nbytes
                self._recent_of.setdefault(segment, set()).add(number)
            while self._recent_bytes > _RECENT_BYTES:
                self._recent_bytes -= self._recent.popitem(last=False)[1].offsets.nbytes

    def _forget(self, segment: int) -> None:
        """Let go of a segment's mapping, and of all that holds on to it here."""
        self._maps.pop(segment, None)
        self._inodes.pop(segment, None)
        for number in self._recent_of.pop(segment, ()):
            chunk = self._recent.pop(number, None)
            self._recent_bytes -= chunk.offsets.nbytes if chunk is not None else 0

    def _forget_deleted(self, segment: int) -> bool:
        """Let go of what was deleted meanwhile, whose disk is free only then; says whether a segment was."""
        with self._lock:
            self._forget_all_deleted()
            return segment not in self._maps

    def _forget_all_deleted(self) -> None:
        for segment, inode in list(self._inodes.items()):
            with suppress(OSError):
                if segment_path(self.folder / "segments", segment).stat().st_ino == inode:
                    continue
            self._forget(segment)
            self._whole = {told for told in self._whole if told[0] != segment}

    @property
    def all_whole(self) -> bool:
        """Whether this process has seen every chunk to be there and whole."""
        return len(self._whole) >= self._chunk_count

    def will_need(self, numbers: Callable[[], np.ndarray]) -> None:
        """Let the system read chunks ahead, if this process has lately had to wait for its disks at all; else nobody
        asks which."""
        waits = getrusage(RUSAGE_SELF).ru_majflt
        if waits != self._waits_for_disks:
            self._waits_for_disks = waits
            for _, mapped, page, size in self._pages(numbers()):
                mapped.madvise(mmap.MADV_WILLNEED, page, size)

    def let_go(self, numbers: np.ndarray, *, again: bool = False) -> None:
        """Chunks were used for now. What of their files counts as this process's memory counts no more. They stay
        readable, and in the system's memory as long as that has room.

        Args:
            numbers: Which.
            again: They will be used again soon: those used longest ago go, once there are too many bytes of them.
        """
        if again:
            sizes = np.clip(self._sizes(self._records[numbers]), 0, 1 << 40)  # a record may be damaged
            numbers = np.array(self._used.add(zip(numbers.tolist(), sizes.tolist(), strict=True)), dtype=np.int64)
        give_back([(held, page, size) for held, _, page, size in self._pages(numbers, around=_FAULT_BYTES)])

    def _sizes(self, records: np.ndarray) -> np.ndarray:
        return 4 * records["samples"].astype(np.int64) + records["tokens"].astype(np.int64) * self._dtype.itemsize

    def _pages(self, numbers: np.ndarray, *, around: int = 0) -> Iterator[tuple[np.ndarray, mmap.mmap, int, int]]:
        """Where chunks are mapped, and some bytes around them: in what, from which page on, and how many bytes."""
        records = self._records[numbers]
        starts, sizes = records["offset"].astype(np.int64), self._sizes(records)
        pages = np.maximum(starts - around, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        told = zip(records["segment"].tolist(), pages.tolist(), (starts - pages + sizes + around).tolist(), strict=True)
        for segment, page, size in told:
            known = self._maps.get(segment)
            if known is not None and 0 <= page < len(known[0]) and size > 0:  # a record may be damaged: found when read
                yield *known, page, min(size, len(known[0]) - page)

    def put(self, number: int, chunk: TokenChunk) -> None:
        """Keep a chunk; an OSError where the disk does not take it."""
        self.put_all([(number, chunk)])

    def put_all(self, chunks: Iterable[tuple[int, TokenChunk]]) -> None:
        """Keep chunks, written together; an OSError where the disk does not take them."""
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        payloads = [
            Payload.of(number, each.ids, each.offsets, each.common_length(), self._dtype) for number, each in chunks
        ]
        crcs = [isal_zlib.crc32(payload.ids, isal_zlib.crc32(payload.ends)) for payload in payloads]
        with self._lock:
            if self._index_fd < 0:
                raise OSError(errno.EBADF, "it was closed meanwhile")
            places = self._writer.append(payloads, self._forget_all_deleted)
            for payload, crc, (segment, start) in zip(payloads, crcs, places, strict=True):
                record = np.zeros(1, dtype=_RECORD)
                record["offset"], record["segment"] = start, segment
                record["samples"], record["tokens"] = payload.samples, payload.tokens
                record["crc"] = crc
                record["check"] = _check(record[0])
                os.pwrite(self._index_fd, record.tobytes(), payload.number * _RECORD.itemsize)

    def token_counts(self) -> np.ndarray:
        """Tokens of each chunk; -1 for those that are not there."""
        records = np.array(self._records[: self._chunk_count])
        checks = np.fromiter(map(_check, records), dtype=np.uint32, count=len(records))
        return np.where(records["check"] == checks, records["tokens"].astype(np.int64), -1)

    @contextmanager
    def making(self, number: int) -> Iterator[bool]:
        """Try to be the one who makes a chunk; False where another thread or process is at it."""
        with self._lock:
            mine = number not in self._making
            if mine:
                self._making.add(number)
        if not mine:
            yield False
            return
        if self.read_only or self._lock_fd < 0:
            with self._lock:
                self._making.discard(number)
            yield True  # nobody can keep it, so nobody has to wait for it
            return
        try:
            locked = self._try_lock(number)
            try:
                yield locked is not False
            finally:
                if locked and self._lock_fd >= 0:  # else it was closed meanwhile, and the lock ended with that
                    fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, number)
        finally:
            with self._lock:
                self._making.discard(number)

    def _try_lock(self, number: int) -> bool | None:
        """Whether a chunk is this process's to make; None where the file system has no locks: then every process makes
        what it needs, and the last one's is kept."""
        if not self._has_locks:
            return None
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "%s: the file system has no locks (%s): processes that share this cache may tokenise the same chunks; "
                "a cache folder on a local disk would be shared",
                self.folder,
                error.strerror,
            )
            self._has_locks = False
            return None
        return True

    def _segment(self, number: int, size: int) -> np.ndarray | None:
        """A segment's bytes, at least so many of them; None where they are not there."""
        with self._lock:
            known = self._maps.get(number)
            if known is not None and len(known[0]) >= size:
                return known[0]
            path = segment_path(self.folder / "segments", number)
            try:
                if not self.read_only:
                    os.utime(path)  # the time it was last used: evictions go by it
                with path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):
                return None
            data = np.frombuffer(mapped, dtype=np.uint8)
            self._forget(number)  # it has grown
            self._forget_all_deleted()
            self._maps[number], self._inodes[number] = (data, mapped), inode
            return data if len(data) >= size else None


def _close_all(fds: set[int]) -> None:
    while fds:
        with suppress(OSError):
            os.close(fds.pop())


def _check(record: np.void) -> int:
    """CRC of a record's other fields; never that of zeros, so that an empty record is none."""
    return zlib.crc32(record.tobytes()[:-4], 1) or 1

"""Pieces of remote objects on this machine's disk: bounded in bytes, shared by its processes, never the only copy.

    <folder>/PENSTOCK_DISK_CACHE     says that the folder is ours; without it nothing here is touched
             used                    bytes of all pieces, at least; under the lock
             ab/cdef....piece        magic, CRC-32 and length of the payload, what it is of; then up to 1 MiB of it

A piece is named by the object's URL, its version and its place, so that a changed object is another one. It is written
under a lock, as a temporary file that is renamed: whoever is killed leaves a file that the next eviction removes. It is
checked whenever it is read, so nothing is synced: what a power loss spoils is dropped and fetched again. Reading takes
no lock: a piece evicted meanwhile is read to its end, or is not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isal import isal_zlib

from penstock.errors import ConfigError, StorageBusy, StorageError
from penstock.faults import reach
from penstock.storage.files import make_folder
from penstock.storage.keys import LOCK_SUFFIX, TEMP_SUFFIX
from penstock.storage.locks import waiting_file_lock

_log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
MARKER = "PENSTOCK_DISK_CACHE"
_TOLD = b"Pieces of remote objects, kept by penstock. Deleting this folder loses nothing.\n"
_HEAD = struct.Struct("<8sII32s")
_MAGIC = b"PENSDSK1"
_PIECE = re.compile(r"[0-9a-f]{38}\.piece(" + re.escape(TEMP_SUFFIX) + ")?")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_TURN_S = 2.0
"""How long to wait for others who fill it; then what was read is simply not kept."""
_TOUCH_S = 60.0
_SLACK = 10
"""A tenth more than needed goes in an eviction, so that the next is a while off."""
_SPARE_BYTES = 512 << 20
"""What is left free on the disk, whatever the budget says: others need it too."""


@dataclass(frozen=True, slots=True)
class CachedObject:
    """A remote object, by what names its content."""

    url: str
    version: str
    size_bytes: int

    def digest(self, number: int) -> bytes:
        return hashlib.sha256(f"{self.url}\n{self.version}\n{self.size_bytes}\n{number}".encode()).digest()

    def length(self, number: int) -> int:
        return min(PIECE_BYTES, self.size_bytes - number * PIECE_BYTES)


Fetch = Callable[[int, int], bytes]


class DiskCache:
    """See the module. Safe for threads and processes; constructing does no I/O; holds no files open.

    A folder that is not its own is refused with a `ConfigError`. Whatever else fails (a full disk, a folder that cannot
    be written) is told once, as a warning, and reading goes on without keeping.
    """

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._state = ""
        """Empty before it is first used; then ``open``, ``full`` (nothing more is kept, but read), or ``off``."""

    def __reduce__(self) -> tuple[object, ...]:
        return DiskCache, (self.folder, self.capacity_bytes)

    def read(self, of: CachedObject, start: int, stop: int, fetch: Fetch, *, fill: bool = True) -> bytes:
        """Bytes ``[start, stop)`` of an object; what is not here comes from `fetch`, in one call a gap.

        With `fill`, gaps are fetched and kept in whole pieces. Without, what is not here entirely is fetched as asked
        for, and not kept.
        """
        stop = min(stop, of.size_bytes)
        if start >= stop:
            return b""
        first, behind = start // PIECE_BYTES, -(-stop // PIECE_BYTES)
        found = self._found(of, first, behind) if self._may_read() else {}
        if len(found) < behind - first:
            if not fill:
                return fetch(start, stop)
            for begin, end in _gaps(found, first, behind):
                found |= self._fetched(of, begin, end, fetch)
        if behind - first == 1:
            return bytes(found[first][start - first * PIECE_BYTES : stop - first * PIECE_BYTES])
        found[behind - 1] = found[behind - 1][: stop - (behind - 1) * PIECE_BYTES]
        found[first] = found[first][start - first * PIECE_BYTES :]
        return b"".join(found[number] for number in range(first, behind))

    def forget(self, of: CachedObject, start: int, stop: int) -> None:
        """Drop the pieces of a range: they turned out to be wrong, though whole."""
        for number in range(start // PIECE_BYTES, -(-min(stop, of.size_bytes) // PIECE_BYTES)):
            with suppress(OSError):
                self._path(of.digest(number)).unlink()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _found(self, of: CachedObject, first: int, behind: int) -> dict[int, memoryview]:
        pieces = ((number, self._piece(of.digest(number), of.length(number))) for number in range(first, behind))
        return {number: piece for number, piece in pieces if piece is not None}

    def _piece(self, digest: bytes, length: int) -> memoryview | None:
        path = self._path(digest)
        try:
            with path.open("rb", buffering=0) as file:
                data = file.read(_HEAD.size + PIECE_BYTES + 1)
                if os.fstat(file.fileno()).st_mtime < time.time() - _TOUCH_S:
                    with suppress(OSError):
                        os.utime(file.fileno())  # used just now; another's file may be read and not touched
        except OSError:  # mostly: not there
            return None
        payload = memoryview(data)[_HEAD.size :]
        head = _HEAD.pack(_MAGIC, isal_zlib.crc32(payload), len(payload), digest)
        if data[: _HEAD.size] == head and len(payload) == length:
            return payload
        _log.warning("%s is damaged: it is dropped, and fetched again", path)
        with suppress(OSError):
            path.unlink()
        return None

    def _fetched(self, of: CachedObject, first: int, behind: int, fetch: Fetch) -> dict[int, memoryview]:
        begin, end = first * PIECE_BYTES, min(behind * PIECE_BYTES, of.size_bytes)
        data = fetch(begin, end)
        if len(data) != end - begin:
            raise StorageError(f"{of.url}: asked for bytes {begin} to {end} of {of.size_bytes}, got {len(data)}")
        whole = memoryview(data)
        pieces = {
            number: whole[(number - first) * PIECE_BYTES : (number + 1 - first) * PIECE_BYTES]
            for number in range(first, behind)
        }
        if self._state == "open":
            self._keep([(of.digest(number), piece) for number, piece in pieces.items()])
        return pieces

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _keep(self, pieces: Sequence[tuple[bytes, memoryview]]) -> None:
        try:
            lock = self.folder / f"lock{LOCK_SUFFIX}"
            with waiting_file_lock(lock, holding=str(self.folder), purpose="filling it", timeout_s=_TURN_S):
                used = self._used()
                for digest, payload in pieces:
                    used = self._keep_one(digest, payload, used)
        except StorageBusy:
            return  # others are at it, or one hangs: what was read is here, and that is what counts
        except (OSError, StorageError) as error:
            self._give_up(error)

    def _keep_one(self, digest: bytes, payload: memoryview, used: int) -> int:
        path, size = self._path(digest), _HEAD.size + len(payload)
        if size > self.capacity_bytes or path.exists():
            return used
        if used + size > self.capacity_bytes or self._free_bytes() < size + _SPARE_BYTES:
            used = self._evict(self.capacity_bytes - size, at_least=size)
            if self._free_bytes() < size + _SPARE_BYTES:
                raise StorageError(f"its disk is all but full (less than {_SPARE_BYTES >> 20} MiB would be left)")
        self._note_used(used + size)  # before: whoever is killed here has counted too much, never too little
        temp = path.with_name(path.name + TEMP_SUFFIX)
        path.parent.mkdir(exist_ok=True)
        try:
            with temp.open("wb", buffering=0) as file:
                _write_all(file.fileno(), _HEAD.pack(_MAGIC, isal_zlib.crc32(payload), len(payload), digest))
                reach("storage.before_fsync", path.name)  # in the middle
                _write_all(file.fileno(), payload)
            reach("storage.before_rename", path.name)
            temp.replace(path)
        except OSError:
            with suppress(OSError):
                temp.unlink()
            raise
        reach("storage.after_rename", path.name)
        return used + size

    def _evict(self, room_for: int, *, at_least: int) -> int:
        """Drop what was used longest ago until at most `room_for` bytes are left, and some more; returns how many are.
        Only the holder of the lock does it, so that a temporary file is always a dead one's."""
        kept: list[tuple[float, int, str]] = []
        for entry in self._entries():
            if entry.name.endswith(TEMP_SUFFIX):
                with suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108 - there are many
                continue
            with suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                kept.append((stat.st_mtime, stat.st_size, entry.path))
        total = sum(size for _, size, _ in kept)
        goal = max(0, room_for - self.capacity_bytes // _SLACK)
        needs_disk = at_least + _SPARE_BYTES - self._free_bytes()
        if total > room_for or needs_disk > 0:
            goal = min(goal, total - needs_disk)
            for _, size, path in sorted(kept):
                if total <= goal:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 - there are many
                total -= size
        self._note_used(total)
        return total

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Every file that is surely ours."""
        with os.scandir(self.folder) as folders:
            inner = [e.path for e in folders if _FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        for folder in inner:
            with os.scandir(folder) as files:
                yield from [e for e in files if _PIECE.fullmatch(e.name) and e.is_file(follow_symlinks=False)]

    def _used(self) -> int:
        """Bytes of all pieces: by the count, or by looking where that cannot be trusted (none, another boot)."""
        with suppress(OSError, ValueError):
            boot, _, count = (self.folder / "used").read_text(encoding="ascii").partition(" ")
            if boot == _boot():
                return int(count)
        return self._evict(self.capacity_bytes, at_least=0)

    def _note_used(self, used: int) -> None:
        fd = os.open(self.folder / "used", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, f"{_boot()} {used:020d}".encode(), 0)
        finally:
            os.close(fd)

    def _free_bytes(self) -> int:
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    # -- opening -------------------------------------------------------------------------------------------------------

    def _may_read(self) -> bool:
        with self._lock:
            if not self._state:
                try:
                    self._settle()
                    self._state = "open"
                except (OSError, StorageError) as error:
                    self._turn_off(error)
            return self._state in ("open", "full")

    def _settle(self) -> None:
        """Make the folder ours, or see that it is."""
        make_folder(self.folder)
        if any(os.scandir(self.folder)) and not (self.folder / MARKER).is_file():
            raise ConfigError(
                f"{self.folder} holds files and is no disk cache of penstock (it has no {MARKER}): name another folder "
                "with PENSTOCK_CACHE, or turn the disk cache off with PENSTOCK_DISK_CACHE_BYTES=0"
            )
        with suppress(FileExistsError):
            fd = os.open(self.folder / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, _TOLD)
            finally:
                os.close(fd)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if self._state == "open":
                _log.warning("%s: nothing more is kept on disk: %s; reading goes on without", self.folder, _told(error))
                self._state = "full"  # what is there is still read

    def _turn_off(self, error: Exception) -> None:
        _log.warning("%s: there is no disk cache: %s; reading goes on without", self.folder, _told(error))
        self._state = "off"

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()[:40]
        return self.folder / name[:2] / f"{name[2:]}.piece"


def _gaps(found: dict[int, memoryview], first: int, behind: int) -> list[tuple[int, int]]:
    """Runs of pieces that are not there."""
    gaps: list[tuple[int, int]] = []
    for number in (number for number in range(first, behind) if number not in found):
        if gaps and gaps[-1][1] == number:
            gaps[-1] = (gaps[-1][0], number + 1)
        else:
            gaps.append((number, number + 1))
    return gaps


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _boot() -> str:
    """This boot of the machine; the same for all its processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _told(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

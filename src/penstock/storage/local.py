"""The storage contract on a local folder: an object is a file."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from penstock.errors import ObjectNotFound, PreconditionFailed
from penstock.faults import reach
from penstock.storage.base import ObjectInfo, StillHeld
from penstock.storage.files import TranslatingFile, create_in, drop_empty_folders, fsync_folder, read_range, translated
from penstock.storage.keys import LOCK_SUFFIX, RESERVED, TEMP_SUFFIX, check_key, check_offset, check_prefix, check_range
from penstock.storage.locks import file_lock, waiting_file_lock

_TEMP_NAME = re.compile(r"\.(?P<name>.+)\.[0-9]+\.[0-9a-f]+" + re.escape(TEMP_SUFFIX), re.DOTALL)
_BUFFER_BYTES = 1 << 20
_TURN_S = 60.0
"""How long a conditional put waits for those before it; each takes as long as reading and writing the object."""


class LocalStorage:
    """Objects as files below `root`. Creates folders as needed, on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        return str(self.root)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with translated(path, reading=True):
            return path.read_bytes()

    def get_with_info(self, key: str) -> tuple[bytes, ObjectInfo]:
        data = self.get(key)
        return data, _named(key, data)

    def get_if(self, key: str, allow: Callable[[ObjectInfo], None]) -> tuple[memoryview, ObjectInfo]:
        path = self._path(key)
        with translated(path, reading=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # of a pipe nothing would come
        try:
            with translated(path, reading=True):
                info = _info(key, path, os.fstat(fd))
            allow(info)
            with translated(path, reading=True):
                data = read_range(fd, 0, info.size_bytes)
        finally:
            os.close(fd)
        return memoryview(data), replace(info, size_bytes=len(data))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        path = self._path(key)
        check_range(str(path), start, stop)
        with translated(path, reading=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if stat.S_ISDIR(found.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
                # Bounded by what is there: a range from a damaged index must not become a request for memory.
                return read_range(fd, start, min(stop, found.st_size) - start)
            finally:
                os.close(fd)

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        path = self._path(key)
        check_offset(str(path), start)
        with translated(path, reading=True):
            raw = TranslatingFile(str(path))
            raw.seek(start)
            return io.BufferedReader(raw, _BUFFER_BYTES)

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as writer:
            writer.write(data)

    def put_if_absent(self, key: str, data: bytes) -> ObjectInfo:
        with _LocalWriter(self.root, self._path(key), key, replace=False) as writer:
            writer.write(data)
        return _named(key, data)

    def put_if_match(self, key: str, data: bytes, version: str) -> ObjectInfo:
        path = self._path(key)
        lock = path.with_name(path.name + LOCK_SUFFIX)
        try:
            with waiting_file_lock(lock, holding=str(path), purpose="replacing it", timeout_s=_TURN_S):
                try:
                    _, there = self.get_with_info(key)
                except ObjectNotFound:
                    raise PreconditionFailed(f"{path} is not there: expected its version {version}") from None
                if there.version != version:
                    raise PreconditionFailed(f"{path} changed: expected version {version}, got {there.version}")
                self.put(key, data)
        finally:
            drop_empty_folders(path.parent, self.root)
        return _named(key, data)

    def writer(self, key: str) -> _LocalWriter:
        return _LocalWriter(self.root, self._path(key), key)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with translated(path, reading=True):
            found = path.stat()
        return _info(key, path, found)

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = [key for key in self._walk(prefix) if key.startswith(prefix) and not key.endswith(RESERVED)]
        for key in sorted(keys):
            try:
                info = self.head(key)
            except ObjectNotFound:  # deleted since, or never an object: a dangling link, a socket
                continue
            yield info

    def delete(self, key: str) -> None:
        path = self._path(key)
        with translated(path), suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            path.unlink()
            drop_empty_folders(path.parent, self.root)
        reach("storage.after_delete", key)

    def discard_unfinished(self, prefix: str = "") -> int:
        leftovers = []
        for key in self._walk(prefix):
            meant = _key_of_temp(key)
            if meant is not None and meant.startswith(prefix):
                leftovers.append(self.root / key)
        for path in leftovers:
            with translated(path):
                path.unlink(missing_ok=True)
                drop_empty_folders(path.parent, self.root)
        return len(leftovers)

    @contextmanager
    def exclusive(self, name: str, *, purpose: str) -> Iterator[StillHeld]:
        path = self._path(name)
        try:
            with file_lock(path.with_name(path.name + LOCK_SUFFIX), holding=self.url, purpose=purpose):
                yield _still_held
        finally:
            drop_empty_folders(path.parent, self.root)

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    def _walk(self, prefix: str) -> Iterator[str]:
        """Keys of all files, unfinished ones too, in the folders where keys with this prefix are. Follows no links."""
        top = self.root / check_prefix(prefix)
        with translated(top):
            for folder, folders, names in os.walk(top, onerror=_raise_unless_gone):
                relative = Path(folder).relative_to(self.root).as_posix()
                base = "" if relative == "." else relative + "/"
                folders[:] = [name for name in folders if f"{base}{name}/".startswith(prefix)]
                for name in names:
                    yield base + name


class _LocalWriter:
    """Temp file in the same folder, fsync, rename, fsync of the folder."""

    def __init__(self, root: Path, path: Path, key: str, *, replace: bool = True) -> None:
        self._root = root
        self._path = path
        self._key = key
        self._replace = replace
        self._temp = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}{TEMP_SUFFIX}")
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        assert self._file is not None, "write inside the with block"
        with translated(self._path):
            self._file.write(data)

    def __enter__(self) -> _LocalWriter:
        with translated(self._path):
            self._file = create_in(self._path.parent, lambda: self._temp.open("xb", buffering=_BUFFER_BYTES))
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        published = False
        try:
            if exc_type is not None:
                with suppress(OSError):  # a full disk, once more; the first error is the one to tell
                    file.close()
                return
            with translated(self._path):
                with file:
                    file.flush()
                    reach("storage.before_fsync", self._key)
                    os.fsync(file.fileno())
                self._publish()
            published = True
        finally:
            if not (published and self._replace):
                with suppress(OSError):
                    self._temp.unlink()
            if not published:
                drop_empty_folders(self._path.parent, self._root)

    def _publish(self) -> None:
        reach("storage.before_rename", self._key)
        if self._replace:
            self._temp.replace(self._path)
        else:
            try:
                os.link(self._temp, self._path)
            except FileExistsError:
                raise PreconditionFailed(f"{self._path} exists already: expected no object there") from None
        reach("storage.after_rename", self._key)
        fsync_folder(self._path.parent)
        reach("storage.after_put", self._key)


def _still_held() -> None:
    """What flock gave ends with its holder, and no sooner."""


def _info(key: str, path: Path, found: os.stat_result) -> ObjectInfo:
    if not stat.S_ISREG(found.st_mode):
        raise ObjectNotFound(f"{path} is not a file: expected an object there")
    return ObjectInfo(key, found.st_size, modified=f"{found.st_mtime_ns}-{found.st_ino}")


def _named(key: str, data: bytes) -> ObjectInfo:
    return ObjectInfo(key, len(data), version=f"sha256:{hashlib.sha256(data).hexdigest()}")


def _key_of_temp(key: str) -> str | None:
    """The key that an unfinished write was meant for, or None for any other file."""
    folder, slash, name = key.rpartition("/")
    found = _TEMP_NAME.fullmatch(name)
    return folder + slash + found["name"] if found else None


def _raise_unless_gone(error: OSError) -> None:
    """A folder that cannot be listed is an error; one that is not there, or no folder, has no objects."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error

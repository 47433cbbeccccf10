"""The storage contract on a local folder: an object is a file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.errors import (
    AccessDenied,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StorageBusy,
    StorageError,
    StorageFull,
)
from penstock.faults import reach
from penstock.storage.base import ObjectInfo

_TEMP_SUFFIX = ".penstock-tmp"
_LOCK_SUFFIX = ".lock"


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
        with _translated(self._path(key)):
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        path = self._path(key)
        with _translated(path):
            fd = os.open(path, os.O_RDONLY)
            try:
                return _read_range(fd, start, stop - start)
            finally:
                os.close(fd)

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        path = self._path(key)
        with _translated(path):
            file = path.open("rb", buffering=1 << 20)
            file.seek(start)
            return file

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as writer:
            writer.write(data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with _LocalWriter(self._path(key), key, replace=False) as writer:
            writer.write(data)

    def writer(self, key: str) -> _LocalWriter:
        return _LocalWriter(self._path(key), key)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with _translated(path):
            found = path.stat()
        if not path.is_file():
            raise ObjectNotFound(f"{path} is not a file: expected an object there")
        return ObjectInfo(key, found.st_size)

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with _translated(self.root):
            found = [
                ObjectInfo(path.relative_to(self.root).as_posix(), path.stat().st_size)
                for path in self._walk(prefix)
                if not path.name.endswith((_TEMP_SUFFIX, _LOCK_SUFFIX))
            ]
        yield from sorted((info for info in found if info.key.startswith(prefix)), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path):
            path.unlink(missing_ok=True)
            self._drop_empty_folders(path.parent)
        reach("storage.after_delete", key)

    def discard_unfinished(self, prefix: str = "") -> int:
        leftovers = [path for path in self._walk(prefix) if path.name.endswith(_TEMP_SUFFIX)]
        for path in leftovers:
            with _translated(path):
                path.unlink(missing_ok=True)
                self._drop_empty_folders(path.parent)
        return len(leftovers)

    @contextmanager
    def exclusive(self, name: str, *, purpose: str) -> Iterator[None]:
        path = self._path(name + _LOCK_SUFFIX)
        with _translated(path):
            fd = self._lock(path, purpose)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while still holding it: whoever waits sees a new file and locks that
            os.close(fd)
            self._drop_empty_folders(path.parent)

    def _lock(self, path: Path, purpose: str) -> int:
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(fd, 64).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise StorageBusy(
                    f"{self.root} is in use by another process (pid {holder}), held for {purpose}: "
                    "wait until it ends, or stop it"
                ) from None
            try:
                current = path.stat().st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                current = False
            if current:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
            os.close(fd)  # the holder before us removed this file as it left; lock the one that is there now

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not key or key.startswith("/") or any(part in ("", ".", "..") for part in parts):
            raise ConfigError(f"storage key {key!r} is not valid: expected a relative path without '..' or empty parts")
        return self.root / key

    def _walk(self, prefix: str) -> Iterator[Path]:
        top = self.root / prefix.rpartition("/")[0]
        for folder, _, names in os.walk(top):
            for name in names:
                yield Path(folder, name)

    def _drop_empty_folders(self, folder: Path) -> None:
        """An object store has no empty folders; neither has this one."""
        while folder != self.root and folder.is_relative_to(self.root):
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent


class _LocalWriter:
    """Temp file in the same folder, fsync, rename, fsync of the folder."""

    def __init__(self, path: Path, key: str, *, replace: bool = True) -> None:
        self._path = path
        self._key = key
        self._replace = replace
        self._temp = path.with_name(f".{path.name}.{os.getpid()}.{id(self):x}{_TEMP_SUFFIX}")
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        assert self._file is not None, "write inside the with block"
        with _translated(self._path):
            self._file.write(data)

    def __enter__(self) -> _LocalWriter:
        with _translated(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temp.open("wb", buffering=1 << 20)
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        try:
            with _translated(self._path):
                if exc_type is not None:
                    file.close()
                    return
                with file:
                    file.flush()
                    reach("storage.before_fsync", self._key)
                    os.fsync(file.fileno())
                self._publish()
        finally:
            self._temp.unlink(missing_ok=True)

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
        _fsync_folder(self._path.parent)
        reach("storage.after_put", self._key)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_range(fd: int, start: int, length: int) -> bytes:
    data = os.pread(fd, length, start)
    if len(data) == length or not data:
        return data
    pieces = [data]
    got = len(data)
    while got < length:
        piece = os.pread(fd, length - got, start + got)
        if not piece:
            break
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn an OSError into the error of the contract, naming the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFound(f"{path} does not exist") from error
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise AccessDenied(f"{path} cannot be used: {error.strerror}: check the path and its permissions") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space left to write {path}: free some space and run the same command again; "
                "what was written before is kept"
            ) from error
        if error.errno == errno.EROFS:
            raise AccessDenied(f"{path} is on a read-only file system: choose another folder") from error
        raise StorageError(f"{path}: {error.strerror or error}") from error

"""The storage contract on a local folder: an object is a file."""

from __future__ import annotations

import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from penstock.errors import ConfigError, ObjectNotFound, PreconditionFailed
from penstock.faults import reach
from penstock.storage.base import ObjectInfo
from penstock.storage.files import TranslatingFile, create_in, drop_empty_folders, fsync_folder, read_range, translated
from penstock.storage.locks import file_lock

_TEMP_SUFFIX = ".penstock-tmp"
_TEMP_NAME = re.compile(r"\.(?P<name>.+)\.[0-9]+\.[0-9a-f]+" + re.escape(_TEMP_SUFFIX), re.DOTALL)
_LOCK_SUFFIX = ".penstock-lock"
_RESERVED = (_TEMP_SUFFIX, _LOCK_SUFFIX)
_BUFFER_BYTES = 1 << 20


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

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        path = self._path(key)
        if not 0 <= start <= stop:
            raise ConfigError(f"bytes {start} to {stop} of {path} are no range: expected 0 <= start <= stop")
        with translated(path, reading=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Bounded by what is there: a range from a damaged index must not become a request for memory.
                return read_range(fd, start, min(stop, os.fstat(fd).st_size) - start)
            finally:
                os.close(fd)

    def reader(self, key: str, start: int = 0) -> BinaryIO:
        path = self._path(key)
        if start < 0:
            raise ConfigError(f"offset {start} is not in {path}: expected 0 or more")
        with translated(path, reading=True):
            raw = TranslatingFile(str(path))
            raw.seek(start)
            return io.BufferedReader(raw, _BUFFER_BYTES)

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as writer:
            writer.write(data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with _LocalWriter(self.root, self._path(key), key, replace=False) as writer:
            writer.write(data)

    def writer(self, key: str) -> _LocalWriter:
        return _LocalWriter(self.root, self._path(key), key)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with translated(path, reading=True):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ObjectNotFound(f"{path} is not a file: expected an object there")
        return ObjectInfo(key, found.st_size, modified=f"{found.st_mtime_ns}-{found.st_ino}")

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = [key for key in self._walk(prefix) if key.startswith(prefix) and not key.endswith(_RESERVED)]
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
    def exclusive(self, name: str, *, purpose: str) -> Iterator[None]:
        path = self._path(name)
        try:
            with file_lock(path.with_name(path.name + _LOCK_SUFFIX), holding=self.url, purpose=purpose):
                yield
        finally:
            drop_empty_folders(path.parent, self.root)

    def _path(self, key: str) -> Path:
        if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
            raise ConfigError(f"storage key {key!r} is not valid: expected a relative path without '..' or empty parts")
        if key.endswith(_RESERVED):
            raise ConfigError(
                f"storage key {key!r} is not valid: names ending in {' or '.join(_RESERVED)} are reserved"
            )
        return self.root / key

    def _walk(self, prefix: str) -> Iterator[str]:
        """Keys of all files, unfinished ones too, in the folders where keys with this prefix are. Follows no links."""
        inside = prefix.rpartition("/")[0]
        top = self._path(inside) if inside else self.root
        if "\0" in prefix or prefix.startswith("/"):
            raise ConfigError(f"storage prefix {prefix!r} is not valid: expected the beginning of a key")
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
        self._temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(6)}{_TEMP_SUFFIX}")
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


def _key_of_temp(key: str) -> str | None:
    """The key that an unfinished write was meant for, or None for any other file."""
    folder, slash, name = key.rpartition("/")
    found = _TEMP_NAME.fullmatch(name)
    return folder + slash + found["name"] if found else None


def _raise_unless_gone(error: OSError) -> None:
    """A folder that cannot be listed is an error; one that is not there, or no folder, has no objects."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error

"""What the local store does to single files and folders, with its errors in the contract's words."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import AccessDenied, ObjectNotFound, StorageError, StorageFull

_FOLDER_TRIES = 100

T = TypeVar("T")


def create_in(folder: Path, create: Callable[[], T]) -> T:
    """Create a file in a folder, which may have to be made, and which a `delete` elsewhere may drop in between."""
    for _ in range(_FOLDER_TRIES):
        with suppress(FileNotFoundError, FileExistsError):  # gone, or there when made and gone when looked at
            make_folder(folder)
            return create()
    make_folder(folder)
    return create()


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each entry durable: an object is lost with any folder above it."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def drop_empty_folders(folder: Path, root: Path) -> None:
    """An object store has no empty folders; neither has this one."""
    while folder != root and folder.is_relative_to(root):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_range(fd: int, start: int, length: int) -> bytes:
    if length <= 0:
        return b""
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


class TranslatingFile(io.FileIO):
    """A file whose read errors, too, are those of the contract."""

    def readinto(self, buffer: Any, /) -> int | None:
        with translated(Path(str(self.name)), reading=True):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with translated(Path(str(self.name)), reading=True):
            return super().readall() or b""


@contextmanager
def translated(path: Path, *, reading: bool = False) -> Iterator[None]:
    """Turn an OSError into the error of the contract, naming the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFound(f"{path} does not exist") from error
    except (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        if reading and not isinstance(error, PermissionError):
            raise ObjectNotFound(f"{path} does not exist: {error.strerror}") from error
        is_no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        reason = f"{error.filename or path}: {'is no folder' if is_no_folder else error.strerror}"
        raise AccessDenied(f"{path} cannot be used ({reason}): check the path and its permissions") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space left to write {path}: free some space and run the same command again; "
                "what was written before is kept"
            ) from error
        if error.errno == errno.EFBIG:
            raise StorageError(
                f"{path}: {error.strerror}: raise the limit on the size of files (ulimit -f) and run the same command "
                "again; what was written before is kept"
            ) from error
        if error.errno == errno.ELOOP and reading:
            raise ObjectNotFound(f"{path} does not exist: {error.strerror}") from error
        if error.errno == errno.EROFS:
            raise AccessDenied(f"{path} is on a read-only file system: choose another folder") from error
        raise StorageError(f"{path}: {error.strerror or error}") from error

"""Too little space: a small file system that is filled up, or files that may not grow."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import sys
from pathlib import Path

CANNOT_MOUNT = 77
"""Exit code of a process that has no right to mount."""
_NEW_NAMESPACES = 0x00020000 | 0x10000000  # CLONE_NEWNS | CLONE_NEWUSER: what is mounted is seen here only


class Disk:
    """A small file system below each of some folders, seen by this process and its children alone."""

    def __init__(self, folders: list[Path], size_bytes: int = 3 << 20) -> None:
        """Mount them. The process may have no other thread yet; without the right to mount it ends here."""
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        self._check(libc.unshare(_NEW_NAMESPACES))
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")  # without an owner no file can be made
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            self._check(libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=%d" % size_bytes))
        self._ballasts = [folder / "ballast" for folder in folders]

    @staticmethod
    def _check(result: int) -> None:
        if result:
            sys.exit(CANNOT_MOUNT)

    def exhaust(self) -> None:
        for ballast in self._ballasts:
            with ballast.open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    continue

    def relieve(self) -> None:
        for ballast in self._ballasts:
            ballast.unlink(missing_ok=True)


def on_small_disks(folders: list[Path], module: str, function: str, *args: object) -> None:
    """Call a function with such a disk, in a process of its own. Its module is imported once the disk is there: what
    it imports may start threads."""
    disk = Disk(folders, 16 << 20)
    getattr(importlib.import_module(module), function)(disk, *args)


class Limit:
    """No file of this process may grow."""

    def exhaust(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def relieve(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

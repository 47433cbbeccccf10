"""Which file system a path is on: SQLite's locks do not hold between the machines of a network file system."""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK = frozenset(
    {
        *("afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
        *("ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "weka", "wekafs"),
        *("fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"),
    }
)
_MOUNTS = Path("/proc/self/mounts")


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that a path is on, existing or not; None where it is local or unknown.

    Args:
        path: Any path.
        mounts: The mount table, in the format of ``/proc/mounts``; this machine's where not given.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    place = path.resolve()
    depth, found = -1, None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_unescaped(fields[1]))
        if len(point.parts) >= depth and place.is_relative_to(point):  # of two mounts on one point the later one counts
            depth, found = len(point.parts), fields[2]
    return found if found in _NETWORK else None


def _unescaped(text: str) -> str:
    """Spaces, tabs, newlines and backslashes stand as octal numbers in a mount table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

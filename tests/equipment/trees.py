"""Folders as values, to compare them byte for byte."""

from __future__ import annotations

from pathlib import Path


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder by relative path: a file's bytes, None for a folder, hidden ones and empty ones too."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }

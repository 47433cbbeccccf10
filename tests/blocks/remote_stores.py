"""Ways to look at a whole block store on an object store."""

from __future__ import annotations

from pathlib import Path

from penstock.storage import open_storage
from penstock.storage.address import parse_address
from penstock.storage.client import ObjectClient
from penstock.storage.connection import Timeouts


def objects(url: str) -> dict[str, bytes]:
    """Every object below a URL, locks and whatever else is there too."""
    found: dict = {}
    ObjectClient(parse_address(url), Timeouts()).list_on("", found)
    storage = open_storage(url)
    return {key: storage.get(key) if not key.endswith(".penstock-lock") else b"a lock" for key in sorted(found)}


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }

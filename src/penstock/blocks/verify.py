"""Checks every byte of a block store against what the manifest and the indexes say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.blocks.index import IndexBuilder, index_bytes
from penstock.blocks.manifest import BlockEntry
from penstock.blocks.store import BlockStore
from penstock.errors import ObjectNotFound, StorageError
from penstock.storage import Storage

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file that is not what was written."""

    file: str
    reason: str


def verify_blocks(store: BlockStore) -> Iterator[tuple[BlockEntry, list[Damage]]]:
    """Read every block once, in order; yield it with what is wrong with it. Memory: one block's index."""
    for entry in store.manifest.blocks:
        yield entry, list(_damages(store, entry))


def sizes_of_blocks(storage: Storage) -> dict[str, int]:
    """Bytes of everything where the blocks are. One list."""
    return {info.key: info.size_bytes for info in storage.list("blocks/")}


def damage_of(sizes: Mapping[str, int], entry: BlockEntry) -> str | None:
    """What is wrong with a block as far as `sizes_of_blocks` tells; None where nothing is."""
    for file, expected in ((entry.file, entry.size_bytes), (entry.index_file, index_bytes(entry.sample_count))):
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != expected:
            return f"{file} has {sizes[file]} bytes, expected {expected}"
    return None


def _damages(store: BlockStore, entry: BlockEntry) -> Iterator[Damage]:
    digest = hashlib.sha256()
    builder = IndexBuilder()
    samples = size = 0
    try:
        with store.storage.reader(entry.file) as file:
            while lines := file.readlines(_PIECE_BYTES):
                data = b"".join(lines)
                digest.update(data)
                builder.extend(lines)
                samples += len(lines)
                size += len(data)
    except ObjectNotFound:
        yield Damage(file=entry.file, reason="missing")
        return
    except StorageError as error:
        yield Damage(file=entry.file, reason=f"cannot be read: {error}")
        return
    if size != entry.size_bytes:
        yield Damage(file=entry.file, reason=f"{size} bytes, expected {entry.size_bytes}")
    elif f"sha256:{digest.hexdigest()}" != entry.checksum:
        yield Damage(file=entry.file, reason=f"its bytes have changed: sha256 differs from {entry.checksum}")
    elif samples != entry.sample_count:
        yield Damage(file=entry.file, reason=f"{samples} samples, expected {entry.sample_count}")
    else:
        try:
            index = store.storage.get(entry.index_file)
        except ObjectNotFound:
            yield Damage(file=entry.index_file, reason="missing")
            return
        except StorageError as error:
            yield Damage(file=entry.index_file, reason=f"cannot be read: {error}")
            return
        if index != builder.to_bytes():
            yield Damage(file=entry.index_file, reason="does not match its block")

"""The manifest: what a block store holds. A function of source and options alone: no times, no paths of its own."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import orjson

from penstock.errors import BlockStoreError, differences

MANIFEST_KEY = "block_manifest.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """One block: where it is, which samples it holds, and what its bytes must be."""

    block_id: int
    file: str
    """Key of the block, relative to the data set's root; its index has the same name and ends in .idx."""
    sample_count: int
    start_index: int
    """Id of its first sample."""
    end_index: int
    """Id after its last sample."""
    size_bytes: int
    checksum: str
    """sha256 of the block's bytes."""

    @property
    def index_file(self) -> str:
        return self.file.removesuffix(".jsonl") + ".idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A bad row that was left out, by the user's choice."""

    position: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetHeader:
    """What is known before the first block is written; fixes the data set's identity."""

    dataset_name: str
    source: str
    dataset_id: str
    block_size: int
    block_bytes: int | None
    text_column: str | None
    token_column: str | None = None
    """The column of token ids, where the source came tokenised."""
    revision: str | None = None
    """The version of the source that was read, where it has versions: a Hub repository's commit."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A data set: its header, its blocks, and whether the source has ended."""

    header: DatasetHeader
    complete: bool
    blocks: list[BlockEntry] = field(default_factory=list)
    skipped_count: int = 0
    skipped_rows: list[SkippedRow] = field(default_factory=list)
    """The first of the rows left out; `skipped_count` counts all."""

    @property
    def total_samples(self) -> int:
        return self.blocks[-1].end_index if self.blocks else 0

    @property
    def total_blocks(self) -> int:
        return len(self.blocks)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the identity and of every block's entry: two stores with one fingerprint hold the same."""
        header = self.header
        identity = [header.dataset_id, header.block_size, header.block_bytes, header.text_column]
        digest = hashlib.sha256(orjson.dumps(identity + [header.token_column] * bool(header.token_column)))
        for block in self.blocks:
            digest.update(orjson.dumps(block))
        return "sha256:" + digest.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """The fields as they stand in the file and in ``inspect --json``; those added later only where they say
        something."""
        header = asdict(self.header)
        for name in ("token_column", "revision"):
            if header[name] is None:
                del header[name]
        return {
            "version": VERSION,
            **header,
            "fingerprint": self.fingerprint,
            "total_samples": self.total_samples,
            "total_blocks": self.total_blocks,
            "complete": self.complete,
            "skipped_count": self.skipped_count,
            "skipped_rows": [asdict(row) for row in self.skipped_rows],
            "blocks": [asdict(block) for block in self.blocks],
        }

    def to_json(self) -> bytes:
        return orjson.dumps(self.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest back, checking that it agrees with itself."""
        try:
            fields = orjson.loads(data)
            if fields["version"] != VERSION:
                raise BlockStoreError(
                    f"{where} has version {fields['version']}, expected {VERSION}: "
                    "it was written by another version of penstock; use that one, or ingest again"
                )
            names = DatasetHeader.__dataclass_fields__
            header = DatasetHeader(**{name: fields[name] for name in names if name in fields})
            manifest = cls(
                header=header,
                complete=fields["complete"],
                blocks=[BlockEntry(**entry) for entry in fields["blocks"]],
                skipped_count=fields["skipped_count"],
                skipped_rows=[SkippedRow(**row) for row in fields["skipped_rows"]],
            )
            told = {name: fields[name] for name in ("fingerprint", "total_samples", "total_blocks")}
            derived = {name: getattr(manifest, name) for name in told}
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BlockStoreError(
                f"{where} is damaged ({type(error).__name__}: {error}): restore it, or ingest again into a new folder"
            ) from error
        if wrong := differences(told, derived):
            raise BlockStoreError(
                f"{where} disagrees with itself ({'; '.join(wrong)}): restore it, or ingest again into a new folder"
            )
        return manifest

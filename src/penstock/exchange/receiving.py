"""Receiving what a miner sent: everything about it is doubted, and its time and size before a byte of it is taken.

one request ── the answer's head: written in time? no larger than it can be? ── its body ── safetensors, digest
     ── header: this run, window, worker, weights ── types, shapes, places, finite ── norm
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import ArtifactRejected, ObjectNotFound, StorageError, TransientStoreError
from penstock.exchange.artifacts import Artifact, largest, unpack
from penstock.exchange.codec import ContributionCodec
from penstock.exchange.keys import VERSION, Keys
from penstock.exchange.places import refuse_larger, store_time
from penstock.storage import ObjectInfo, Storage

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow:
    """What a contribution has to be for."""

    window: int
    base: str
    """Digest of the manifest before it, which nobody knows before the window opens."""
    opened_at: float
    closes_at: float
    """By the store's clock, grace included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A contribution that was checked."""

    uid: str
    info: ObjectInfo
    written_at: float
    artifact: Artifact
    norm: float
    samples_digest: str


class TooLate(ArtifactRejected):
    """Written after its window had closed, as far as is known: its time may yet be made longer."""

    def __init__(self, written_at: float, closes_at: float) -> None:
        told = f"written {written_at - closes_at:.0f} s after its window had closed, grace included"
        super().__init__("late", told)
        self.written_at = written_at


class Receiver:
    """Reads contributions of a run. Safe for threads."""

    def __init__(self, storage: Storage, keys: Keys, codec: ContributionCodec) -> None:
        self._storage = storage
        self._keys = keys
        self._codec = codec
        self.limit_bytes = largest(codec.shapes)
        """More than a contribution can have."""

    def look(self, uid: str, window: int) -> ObjectInfo | None:
        """Whether something is there, by one small request."""
        try:
            return self._storage.head(self._keys.contribution(uid, window))
        except ObjectNotFound:
            return None
        except StorageError as error:
            self._blame_the_store(error)
            return None

    def receive(self, uid: str, expected: OpenWindow, *, seen: ObjectInfo | None = None) -> Received | None:
        """Read and check what is there, None where nothing is; `ArtifactRejected` says why it is not used."""
        found = self.read(uid, expected, seen=seen)
        return None if found is None else self.check(uid, expected, *found)

    def read(
        self, uid: str, expected: OpenWindow, *, seen: ObjectInfo | None = None
    ) -> tuple[memoryview, ObjectInfo] | None:
        """What is there if it came in time and is no larger than it can be, unchecked otherwise.

        Args:
            uid: Whose.
            expected: What it has to be for.
            seen: The very object that it has to be, where it was read before.
        """
        try:
            return self._storage.get_if(
                self._keys.contribution(uid, expected.window), lambda found: self._allow(found, expected, seen)
            )
        except ObjectNotFound:
            return None
        except StorageError as error:
            self._blame_the_store(error)
            raise ArtifactRejected("unreadable", "the store does not hand it out, and answers otherwise") from error

    def check(self, uid: str, expected: OpenWindow, data: memoryview, info: ObjectInfo) -> Received:
        """Check what was read."""
        artifact = unpack(data, self._codec.shapes)
        samples = self._check_header(artifact, uid, expected)
        norm = self._codec.check(artifact.tensors)
        return Received(
            uid=uid, info=info, written_at=store_time(info), artifact=artifact, norm=norm, samples_digest=samples
        )

    def _blame_the_store(self, error: StorageError) -> None:
        """Raise what is wrong with the store. Where it only refuses this object, the object is at fault: a miner may
        encrypt its own with a key of its own, or have it archived, and nobody else can read it then."""
        if isinstance(error, TransientStoreError):
            raise error
        with suppress(ObjectNotFound):
            self._storage.get(self._keys.settings)  # nothing is there in this bucket, nor can a miner write it

    def _allow(self, info: ObjectInfo, expected: OpenWindow, seen: ObjectInfo | None) -> None:
        """Refuse to read what is out of time, too large, or another than was seen."""
        if seen is not None and (info, info.modified) != (seen, seen.modified):
            raise ArtifactRejected("changed", "it was written again after it had been checked")
        written_at = store_time(info)
        if int(written_at) < int(expected.opened_at):  # stores tell whole seconds
            told = f"written {expected.opened_at - written_at:.0f} s before its window opened"
            raise ArtifactRejected("early", told)
        if written_at > expected.closes_at:
            raise TooLate(written_at, expected.closes_at)
        refuse_larger(info, self.limit_bytes)

    def _check_header(self, artifact: Artifact, uid: str, expected: OpenWindow) -> str:
        header = artifact.header
        wanted = {
            "kind": "contribution",
            "version": VERSION,
            "run": self._keys.run,
            "uid": uid,
            "window": expected.window,
        }
        for name, value in wanted.items():
            if header.get(name) != value:
                raise ArtifactRejected("header", f"{name} is {str(header.get(name))[:40]!r}: expected {value!r}")
        if header.get("base") != expected.base:
            raise ArtifactRejected("base", "it was not made from the weights of this window")
        samples = header.get("samples_digest")
        if not isinstance(samples, str) or not _DIGEST.fullmatch(samples):
            raise ArtifactRejected("header", "samples_digest is no digest: expected 64 hexadecimal digits")
        return samples

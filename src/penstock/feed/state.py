"""What a loader stores with a checkpoint: where it stands, and everything that makes its batches what they are."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, differences

VERSION = 1
_STANDS_FOR = {
    "dataset_id": "the source's files and the options it was ingested with",
    "fingerprint": "the bytes of its blocks",
    "tokenizer": "its files, its end of text, and the version of the library that tokenises",
    "chat_template": "how chats are written",
}
"""What a digest tells nobody who reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionEntry:
    """Samples excluded from a step of an epoch on."""

    epoch: int
    step: int
    window: int
    """The first window it holds for, where sequences are packed: one that is begun is not packed anew."""
    sample_ids: np.ndarray
    source: int = 0
    """Which data set of a mixture; epoch, step and window are then of that data set's own course."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "window": self.window,
            "samples": pack_ids(self.sample_ids),
            **({"source": self.source} if self.source else {}),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ExclusionEntry:
        return cls(
            epoch=int(fields["epoch"]),
            step=int(fields["step"]),
            window=int(fields["window"]),
            sample_ids=unpack_ids(str(fields["samples"])),
            source=int(fields.get("source", 0)),
        )


class StreamPlace(NamedTuple):
    """Where one data set of a mixture stands in its own course."""

    epoch: int = 0
    window: int = 0
    offset: int = 0
    """Samples of the epoch, or sequences of the window, that were drawn."""
    draws: int = 0
    tokens: int = 0
    """Drawn in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """One state for all ranks and any world size. Small, JSON, versioned."""

    shape: dict[str, Any]
    """Whatever shapes the batches: data set, seed, batch size, order, packing, tokenizer."""
    epoch: int = 0
    step: int = 0
    """Batches of the epoch that were handed out."""
    window: int = 0
    offset: int = 0
    """Where the next batch begins, where sequences are packed: a window, and sequences of it."""
    batch_sizes: tuple[tuple[int, int], ...] = ()
    """Batch sizes of this epoch, each with the step from which it holds; empty where it never changed."""
    exclusions: tuple[ExclusionEntry, ...] = ()
    origin: int = 0
    """Draws of a mixture by weights before this epoch."""
    drawn: int = 0
    """Draws of a mixture in this epoch."""
    streams: tuple[StreamPlace, ...] = ()
    """Where the data sets of a mixture stand; empty at the very beginning."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "window": self.window,
            "offset": self.offset,
            "shape": self.shape,
            "batch_sizes": [list(entry) for entry in self.batch_sizes],
            "exclusions": [entry.as_dict() for entry in self.exclusions],
            **({"mixture": self._mixture()} if self.drawn or self.origin or self.streams else {}),
        }

    def _mixture(self) -> dict[str, Any]:
        return {"origin": self.origin, "drawn": self.drawn, "streams": [list(place) for place in self.streams]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LoaderState:
        """Read a state back; one of another version is refused."""
        try:
            if fields["version"] != VERSION:
                raise ConfigError(
                    f"the loader state has version {fields['version']!r}, expected {VERSION}: "
                    "it was written by another version of penstock; use that one"
                )
            mixture: Mapping[str, Any] = fields.get("mixture", {"origin": 0, "drawn": 0, "streams": []})
            if negative := [name for name in ("epoch", "step", "window", "offset") if fields[name] < 0]:
                raise ValueError(f"{', '.join(negative)} below 0")
            return cls(
                shape=dict(fields["shape"]),
                epoch=int(fields["epoch"]),
                step=int(fields["step"]),
                window=int(fields["window"]),
                offset=int(fields["offset"]),
                batch_sizes=tuple((int(step), int(size)) for step, size in fields["batch_sizes"]),
                exclusions=tuple(ExclusionEntry.from_dict(entry) for entry in fields["exclusions"]),
                origin=int(mixture["origin"]),
                drawn=int(mixture["drawn"]),
                streams=tuple(StreamPlace(*map(int, place)) for place in mixture["streams"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"not a loader state ({type(error).__name__}: {error}): expected state_dict()'s"
            ) from error

    def refuse_other(self, shape: dict[str, Any], allow: Collection[str] = ()) -> None:
        """Refuse a state whose batches would not be these; name each field that differs."""
        got = {name: value for name, value in shape.items() if name not in allow}
        expected = {name: value for name, value in self.shape.items() if name not in allow}
        if different := differences(got, expected):
            resized = any(told.startswith("batch_size") for told in different)
            meant = [f"{name} is {what}" for name, what in _STANDS_FOR.items() if got.get(name) != expected.get(name)]
            told = "; ".join(different) + (f" ({'; '.join(meant)})" if meant else "")
            raise ConfigError(
                f"the state belongs to other batches: {told}: go back to those settings, or begin anew"
                + ("; allow={'batch_size'} goes on with another batch size" if resized else "")
            )


def pack_ids(sample_ids: np.ndarray) -> str:
    """A set of ids as text: a compressed bitmap, in base64."""
    if not len(sample_ids):
        return ""
    from pyroaring import BitMap64

    bitmap = BitMap64(np.asarray(sample_ids, dtype=np.uint64))
    bitmap.run_optimize()
    return base64.b64encode(bitmap.serialize()).decode("ascii")


def unpack_ids(text: str) -> np.ndarray:
    """The inverse of `pack_ids`; sorted."""
    if not text:
        return np.empty(0, dtype=np.int64)
    from pyroaring import BitMap64

    return np.array(BitMap64.deserialize(base64.b64decode(text, validate=True)).to_array(), dtype=np.int64)

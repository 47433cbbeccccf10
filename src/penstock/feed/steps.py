"""What feeds hand to a loader: batches, with where it stands once they were handed out."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

Batch = dict[str, Any]


class Steps(Protocol):
    """Some batches for one rank, one or more, that follow each other."""

    @property
    def batches(self) -> list[Batch]: ...

    def place(self, handed: int) -> dict[str, Any]:
        """Where the loader stands once so many of them were handed out: fields of `LoaderState`."""
        ...


class Step(NamedTuple):
    """One batch."""

    batch: Batch
    size_bytes: int
    behind: dict[str, Any]
    """Where the loader stands behind it."""

    @property
    def batches(self) -> list[Batch]:
        return [self.batch]

    def place(self, handed: int) -> dict[str, Any]:
        assert handed == 1
        return self.behind


class PackedSteps(NamedTuple):
    """Batches that end in one window. They are handed out far more often than anybody asks where a loader stands, so
    that is worked out when it is asked for."""

    batches: list[Batch]
    step: int
    window: int
    offset: int
    """Where the first of them begins, as the window's rows count; below 0 where that is in a window before."""
    batch_size: int
    row_count: int
    """Of the window."""

    def place(self, handed: int) -> dict[str, Any]:
        offset = self.offset + handed * self.batch_size
        at_end = offset == self.row_count
        return {"step": self.step + handed, "window": self.window + at_end, "offset": 0 if at_end else offset}

"""What kinds of data there are on the Hub, and which of them can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import SourceError

Support = Literal["full support", "text extraction needed", "not yet"]


@dataclass(frozen=True, slots=True)
class Modality:
    """One kind of data."""

    name: str
    title: str
    support: Support

    @property
    def tag(self) -> str:
        """How the Hub marks data sets of this kind."""
        return f"modality:{self.name}"

    @property
    def can_train(self) -> bool:
        return self.support == "full support"

    @property
    def reason(self) -> str:
        """Why it can or cannot be trained on."""
        return {
            "full support": f"{self.title} can be trained on",
            "text extraction needed": f"{self.title} has to become text first: extract it, then ingest the text",
            "not yet": f"{self.title} cannot be trained on yet: only text can",
        }[self.support]


MODALITIES = {
    modality.name: modality
    for modality in (
        Modality("text", "Text", "full support"),
        Modality("audio", "Audio", "not yet"),
        Modality("image", "Image", "not yet"),
        Modality("video", "Video", "not yet"),
        Modality("tabular", "Tabular", "not yet"),
        Modality("document", "Document", "text extraction needed"),
        Modality("geospatial", "Geospatial", "not yet"),
        Modality("timeseries", "Time-series", "not yet"),
        Modality("3d", "3D", "not yet"),
    )
}


def modalities_of(tags: Sequence[str]) -> list[Modality]:
    """The kinds of data a data set's tags name; none where it is not tagged."""
    names = [tag.removeprefix("modality:") for tag in tags if tag.startswith("modality:")]
    return [MODALITIES[name] for name in names if name in MODALITIES]


def refuse_untrainable(spec: str, tags: Sequence[str]) -> None:
    """Refuse a data set that says of itself that it holds no text."""
    kinds = modalities_of(tags)
    if not kinds or any(kind.can_train for kind in kinds):
        return
    reasons = "; ".join(kind.reason for kind in kinds)
    raise SourceError(
        f"{spec} holds no text ({', '.join(kind.tag for kind in kinds)}): {reasons}: "
        "pass --no-text to store its rows all the same, or --text-column where one of its columns is text"
    )

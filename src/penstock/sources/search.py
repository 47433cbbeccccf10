"""Finding data sets on the Hub, with a word on whether they can be trained on."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import SourceError, StorageError
from penstock.sources.modalities import Modality, modalities_of
from penstock.storage import search_hub


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDataset:
    """A data set of the Hub, as a search finds it."""

    spec: str
    """What to write to ingest or train on it."""
    modalities: list[str]
    can_train: bool | None
    """Whether its modality is supported; None where the Hub does not know it."""
    downloads: int
    likes: int
    gated: bool
    last_modified: str | None


def search_datasets(query: str, modality: Modality | None = None, *, limit: int = 20) -> list[FoundDataset]:
    """Data sets whose names match, the most downloaded first. One request."""
    try:
        found = search_hub(query, tags=[modality.tag] if modality else [], limit=limit)
    except StorageError as error:
        raise SourceError(str(error)) from error
    return [_found(entry) for entry in found]


def _found(entry: dict[str, object]) -> FoundDataset:
    tags = entry.get("tags")
    kinds = modalities_of([str(tag) for tag in tags] if isinstance(tags, list) else [])
    downloads, likes = entry.get("downloads"), entry.get("likes")
    modified = entry.get("lastModified")
    return FoundDataset(
        spec=f"hf://{entry['id']}",
        modalities=[kind.name for kind in kinds],
        can_train=any(kind.can_train for kind in kinds) if kinds else None,
        downloads=downloads if isinstance(downloads, int) else 0,
        likes=likes if isinstance(likes, int) else 0,
        gated=bool(entry.get("gated")),
        last_modified=str(modified) if modified else None,
    )

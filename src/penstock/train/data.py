"""The data sets of a run as blocks, made where need be, and made again where the cache folder was emptied."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

from penstock.blocks import IngestProgress, prepare_blocks
from penstock.train.config import TrainingConfig

_SOURCES = {"dataset_file": "dataset_source", "eval_file": "eval_source"}


def make_blocks(
    config: TrainingConfig,
    said: Container[str] = frozenset(_SOURCES),
    on_progress: Callable[[IngestProgress], None] | None = None,
) -> None:
    """Have blocks of every data set that is named, and note what they were made of.

    Args:
        config: Changed in place.
        said: The settings that somebody has said now. What comes from a run may be blocks that are gone since.
        on_progress: Sees a raw data set being ingested.
    """
    for name, source in _SOURCES.items():
        named: str = getattr(config, name)
        if not named:
            continue
        made_of: str = getattr(config, source)
        if name in said:
            made_of = ""
        elif made_of and "://" not in named and not Path(named).exists():
            named = made_of
        made = prepare_blocks(named, config.samples_per_block, on_progress=on_progress)
        if made != named:
            made_of = named if "://" in named else str(Path(named).absolute())
        setattr(config, name, made)
        setattr(config, source, made_of)

"""Which files of a repository make up a config and a split.

The rules (patterns in the card, splits by file and folder names) are those of `datasets`, and are asked of it: it sees
a folder of empty files with the repository's names and its real card, so that nothing but this package talks to the
network.
"""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from penstock.errors import SourceError
from penstock.sources.archives import is_hidden
from penstock.sources.formats import can_read
from penstock.storage import HubStorage, ReadableStorage
from penstock.storage.hub import missing_part

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files whose content says what the others are."""
_OWN_MODULES = ("arrow", "csv", "json", "parquet", "text")
"""Kinds of repositories whose files are read by the readers of this package."""
_IRRELEVANT = ("batch_size", "chunksize", "data_dir", "data_files", "description", "features", "name", "version")
"""Settings of a config that do not change which rows there are."""
_PROSE = (".md", ".py", ".rst")
"""Files that are about the data, as a rule."""
_ZIPS_LOOKED_INTO = 16
_ZIP_NAMES = 1000

_MISUNDERSTANDINGS = (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What `datasets` raises over a card it cannot make sense of, besides its own errors."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One config and one split of a repository."""

    config: str
    split: str
    keys: list[str]
    is_plain: bool
    """Whether the files say everything; else `datasets` has to read them, with the config's settings."""
    settings: dict[str, str]
    """How the config differs from what is usual for files of its kind."""
    in_tables: bool
    """Whether `datasets` makes tables of such files, or single rows, whose columns may come in any order."""


def choose_files(storage: ReadableStorage, name: str, first: str | None, split: str | None) -> Chosen:
    """Find the config and the split that were asked for, and their files in order.

    Args:
        storage: The repository.
        name: Its name, for messages.
        first: A config; or a split, where no config has that name and no split is given.
        split: A split.
    """
    datasets = _require_datasets()
    with TemporaryDirectory(prefix="penstock-hub-") as folder, _understood(name, folder):
        root = Path(folder, name.rpartition("/")[2] or "dataset").resolve()
        _lay_out(storage, root)
        configs = datasets.get_dataset_config_names(str(root))
        what = f"no config {first!r}" if first else "it has several configs"
        if first is not None and first not in configs and split is None:
            what, first, split = f"no config or split {first!r}", None, first
        config = first or datasets.get_dataset_default_config_name(str(root)) or _only(configs)
        if config is None or config not in configs:
            example = f"hf://{name}:{configs[0]}" + (f":{split}" if split else "")
            raise SourceError(f"{name}: {what}: its configs are {', '.join(configs)}: name one, such as {example}")
        builder = datasets.load_dataset_builder(str(root), config, cache_dir=folder)
        files = {
            str(key): [Path(file).relative_to(root).as_posix() for file in found]
            for key, found in (builder.config.data_files or {}).items()
        }
        chosen = _choose_split(name, configs, config, list(files), split)
        if configs == ["default"]:
            _tell_left_out(storage, name, {file for found in files.values() for file in found})
        keys, settings = files[chosen], _settings(builder, files[chosen])
        module = type(builder).__module__.rpartition(".")[2]
        return Chosen(
            config=config,
            split=chosen,
            keys=keys,
            is_plain=module in _OWN_MODULES and not settings and all(can_read(key) for key in keys),
            settings=settings,
            in_tables=isinstance(builder, datasets.ArrowBasedBuilder),
        )


def _lay_out(storage: ReadableStorage, root: Path) -> None:
    """A folder with the repository's names in it, and the content of its cards alone."""
    root.mkdir()
    zips = _Zips(storage)
    for info in storage.list():
        path = root / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if info.key in _CARDS:
            path.write_bytes(storage.get(info.key))
        elif info.key.endswith(".zip"):
            path.write_bytes(zips.hollow(info.key))


class _Zips:
    """Archives with the right names and nothing in them: the names inside tell what kind of repository it is."""

    def __init__(self, storage: ReadableStorage) -> None:
        self._storage = storage
        self._looked = 0
        self._last = b""

    def hollow(self, key: str) -> bytes:
        """An archive with the names of a file's members; where there are many, the later ones are like those before."""
        if self._looked < _ZIPS_LOOKED_INTO:
            self._looked += 1
            with self._storage.reader(key) as file, zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if not is_hidden(name)][:_ZIP_NAMES]
            made = io.BytesIO()
            with zipfile.ZipFile(made, "w") as archive:
                for name in names:
                    archive.writestr(zipfile.ZipInfo(name), b"")
            self._last = made.getvalue()
        return self._last


def _choose_split(name: str, configs: list[str], config: str, splits: list[str], wanted: str | None) -> str:
    if wanted is None:
        wanted = "train" if "train" in splits else _only(splits)
    if wanted in splits:
        return wanted
    what = f"no config or split {wanted!r}" if wanted else "it has several splits"
    others = f"its configs are {', '.join(configs)}; " if len(configs) > 1 else ""
    raise SourceError(
        f"{name}: {what}: {others}the splits of config {config!r} are {', '.join(splits)}: "
        f"name one, such as hf://{name}:{config}:{splits[0]}"
    )


def _settings(builder: DatasetBuilder, keys: list[str]) -> dict[str, str]:
    """What a config says beyond what the readers of this package take for granted."""
    got, usual = builder.config, type(builder.config)()
    different = {
        field.name: repr(getattr(got, field.name))
        for field in fields(got)
        if field.name not in _IRRELEVANT and getattr(got, field.name) != getattr(usual, field.name)
    }
    if different.get("sep") == repr("\t") and all(".tsv" in Path(key).suffixes for key in keys):
        del different["sep"]
    return different


def _tell_left_out(storage: ReadableStorage, name: str, taken: set[str]) -> None:
    """Say which files the rules of `datasets` pass over, though they could be read: it takes one format alone."""
    left_out = [
        info.key
        for info in storage.list()
        if info.key not in taken and can_read(info.key) and not is_hidden(info.key)
        if info.key not in _CARDS and not info.key.endswith(_PROSE)
    ]
    if left_out:
        listed = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        _log.warning("%s: left out %d files that are no part of its splits: %s", name, len(left_out), listed)


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


@contextmanager
def _understood(name: str, folder: str) -> Iterator[None]:
    """Errors of `datasets` about a repository's layout as ours, and its warnings about it not at all."""
    import datasets
    import yaml
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import logging as hub_logging

    verbosity, hub_verbosity = datasets.logging.get_verbosity(), hub_logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        yield
    except (DatasetsError, yaml.YAMLError, zipfile.BadZipFile, *_MISUNDERSTANDINGS) as error:
        advice = "name its files, such as hf://datasets/OWNER/NAME/data/*.parquet"
        if "Dataset scripts" in str(error):
            advice = (
                "use the Hub's conversion of it, such as "
                "hf://datasets/OWNER/NAME@refs/convert/parquet/CONFIG/SPLIT/*.parquet"
            )
        reason = str(error).replace(f"{Path(folder).resolve()}/", "")
        raise SourceError(f"{name}: its layout is not understood: {reason}: {advice}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)


def _require_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_part(error) from error
    return datasets


def repository_path(storage: ReadableStorage) -> str:
    """How `datasets` calls a repository."""
    return f"hf://datasets/{storage.name}" if isinstance(storage, HubStorage) else storage.url

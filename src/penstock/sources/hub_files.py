"""Which files of a repository make up a config and a split.

The rules (patterns in the card, splits by file and folder names) are those of `datasets`, and are asked of it: it sees
a folder of empty files with the repository's names and its real card, so that nothing but this package talks to the
network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError, SourceError
from penstock.sources.formats import can_read
from penstock.storage import HubStorage, ReadableStorage

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files whose content says what the others are."""
_OWN_MODULES = ("arrow", "csv", "json", "parquet", "text")
"""Kinds of repositories whose files are read by the readers of this package."""
_IRRELEVANT = ("batch_size", "chunksize", "data_dir", "data_files", "description", "features", "name", "version")
"""Settings of a config that do not change which rows there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One config and one split of a repository."""

    config: str
    split: str
    keys: list[str]
    is_plain: bool
    """Whether the files say everything; else `datasets` has to read them, with the config's settings."""


def choose_files(storage: ReadableStorage, name: str, first: str | None, split: str | None) -> Chosen:
    """Find the config and the split that were asked for, and their files in order.

    Args:
        storage: The repository.
        name: Its name, for messages.
        first: A config; or a split, where no config has that name and no split is given.
        split: A split.
    """
    datasets = _require_datasets()
    with TemporaryDirectory(prefix="penstock-hub-") as folder, _understood(name):
        root = Path(folder, name.rpartition("/")[2] or "dataset")
        _lay_out(storage, root)
        configs = datasets.get_dataset_config_names(str(root))
        if first is not None and first not in configs and split is None:
            first, split = None, first
            asked_for = f"config or split {split!r}"
        else:
            asked_for = f"config {first!r}"
        config = first or datasets.get_dataset_default_config_name(str(root)) or _only(configs)
        if config is None or config not in configs:
            what = f"no {asked_for}" if first or split else "it has several configs"
            example = f"hf://{name}:{configs[0]}" + (f":{split}" if split else "")
            raise SourceError(f"{name}: {what}: its configs are {', '.join(configs)}: name one, such as {example}")
        builder = datasets.load_dataset_builder(str(root), config, cache_dir=folder)
        files = {str(key): [str(file) for file in found] for key, found in (builder.config.data_files or {}).items()}
        chosen = _choose_split(name, configs, config, list(files), split)
        keys = [Path(file).relative_to(root.resolve()).as_posix() for file in files[chosen]]
        return Chosen(config=config, split=chosen, keys=keys, is_plain=_is_plain(builder, keys))


def _lay_out(storage: ReadableStorage, root: Path) -> None:
    """A folder with the repository's names in it, and the content of its cards alone."""
    root.mkdir()
    for info in storage.list():
        path = root / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if info.key in _CARDS:
            path.write_bytes(storage.get(info.key))


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


def _is_plain(builder: DatasetBuilder, keys: list[str]) -> bool:
    """Whether the readers of this package give the rows that `datasets` would."""
    module = type(builder).__module__.rpartition(".")[2]
    if module not in _OWN_MODULES or not all(can_read(key) for key in keys):
        return False
    got, usual = builder.config, type(builder.config)()
    different = {
        field.name
        for field in fields(got)
        if field.name not in _IRRELEVANT and getattr(got, field.name) != getattr(usual, field.name)
    }
    tabs = all(".tsv" in Path(key).suffixes for key in keys) and getattr(got, "sep", None) == "\t"
    return not different or (different == {"sep"} and tabs)


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


@contextmanager
def _understood(name: str) -> Iterator[None]:
    """Errors of `datasets` about a repository's layout as ours, and its warnings about it not at all."""
    import datasets
    import yaml
    from datasets.exceptions import DatasetsError

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    try:
        yield
    except (DatasetsError, OSError, RuntimeError, TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        advice = "name its files, such as hf://datasets/OWNER/NAME/data/*.parquet"
        if "script" in str(error):
            advice = (
                "use the Hub's conversion of it, such as "
                "hf://datasets/OWNER/NAME@refs/convert/parquet/CONFIG/SPLIT/*.parquet"
            )
        raise SourceError(f"{name}: its layout is not understood: {error}: {advice}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)


def _require_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"hf:// needs the hub extra ({error}): pip install 'penstock[hub]'") from error
    return datasets


def repository_path(storage: ReadableStorage) -> str:
    """How `datasets` calls a repository."""
    return f"hf://datasets/{storage.name}" if isinstance(storage, HubStorage) else storage.url

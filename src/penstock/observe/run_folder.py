"""A run's folder, read only."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ConfigError
from penstock.ledger import Ledger, open_ledger
from penstock.storage import LocalStorage
from penstock.storage.keys import LOCK_SUFFIX
from penstock.storage.locks import is_held


class RunFolder:
    """Config, ledger and metrics of a run, each opened on first use."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config as it stands in config.toml."""
        file = self.path / "config.toml"
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path} holds no run: it has no config.toml; name the folder of a run") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        settings, dataset = found.get("settings"), found.get("dataset")
        whole = isinstance(settings, dict) and {"dataset_file", "model"} <= settings.keys()
        if not whole or not (isinstance(dataset, dict) and {"name", "total_samples"} <= dataset.keys()):
            raise ConfigError(f"{file} is damaged: it lacks settings or the data set; restore it")
        return found

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def dataset(self) -> dict[str, Any]:
        return self.config["dataset"]

    @cached_property
    def ledger(self) -> Ledger:
        _ = self.config  # a folder without a run is named as such, not as one without a ledger
        return open_ledger(self.settings.get("ledger") or self.path / "ledger.sqlite")

    def is_training(self) -> bool:
        """Whether a training has this folder in its hands."""
        return is_held(self.path / f"run{LOCK_SUFFIX}")

    def require_training(self) -> None:
        """Refuse where no training is under way that could hear a word."""
        _ = self.config
        if not self.is_training():
            raise ConfigError(f"no training is under way in {self.path}: nothing was changed")

    def leave_word(self, name: str, text: str) -> None:
        """Leave a file for the training that is under way, whole or not at all."""
        LocalStorage(self.path).put(name, text.encode())

    def events(self) -> Iterator[dict[str, Any]]:
        """Events of the metrics file, oldest first; a line that a killed writer left unfinished is passed over."""
        path = Path(self.settings.get("log_file") or self.path / "metrics.jsonl")
        if not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                try:
                    event = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(event, dict):
                    yield event

"""Where settings come from, the later winning: defaults, the run being resumed, a TOML file, ``--set``, flags.

A file holds settings by their names, as they are or in tables that only sort them:

    dataset_file = "data/corpus"          [optimizer]
    batch_size = 32                       learning_rate = 3e-4
                                          lr_schedule = "cosine"

``--set optimizer.learning_rate=1e-4`` and ``--set learning_rate=1e-4`` say the same. Paths are relative to where the
command is run. The config.toml of a run can be given as a file too: its settings are taken, its folder is not.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.errors import ConfigError
from penstock.storage import open_storage
from penstock.train.config import CONFIG_KEY, RunConfig, TrainingConfig

SECTIONS: dict[str, dict[str, str]] = {
    "data": {
        name: name
        for name in (
            "dataset_file",
            "samples_per_block",
            "dataset_chunk_size",
            "tokenizer",
            "vocab_size",
            "batch_size",
            "max_seq_len",
            "gradient_accumulation_steps",
        )
    },
    "long": {name: name for name in ("use_chunked_training", "chunk_size", "bptt_chunks", "cpu_offload")},
    "model": {
        "name": "model",
        "fresh_weights": "fresh_weights",
        "resize_embeddings": "resize_embeddings",
        "attend_across_documents": "attend_across_documents",
        "precision": "precision",
        "halt_max_steps": "halt_max_steps",
        "streamed": "streamed",
        "gpu_budget_gib": "gpu_budget_gib",
        "offload_activations": "offload_activations",
    },
    "optimizer": {
        name: name
        for name in (
            "learning_rate",
            "lr_schedule",
            "warmup_steps",
            "schedule_steps",
            "min_lr_ratio",
            "weight_decay",
            "beta1",
            "beta2",
            "max_grad_norm",
            "on_nan",
        )
    },
    "parallel": {
        name: name
        for name in (
            "parallel_independent",
            "ddp",
            "workers",
            "cuda_ids",
            "device",
            "plan",
            "merge",
            "outer_learning_rate",
            "outer_momentum",
            "respawn",
            "stall_timeout_s",
            "rank_timeout_s",
        )
    },
    "run": {
        name: name
        for name in (
            "run_dir",
            "seed",
            "steps",
            "stop_after_epoch",
            "iterate",
            "commit_every_chunks",
            "commit_every_s",
            "keep_checkpoints",
            "session_timeout_s",
            "ledger",
            "log_file",
        )
    },
    "eval": {"file": "eval_file", "every": "eval_every", "batches": "eval_batches"},
}
"""Tables of a settings file: each name in them, and the field of `TrainingConfig` it means."""


def settings_of_run(run_dir: str | Path) -> dict[str, Any] | None:
    """The settings a run was begun or last resumed with, as it saved them; None where there is no run."""
    found = RunConfig.load(open_storage(run_dir))
    return None if found is None else {**asdict(found.training), "run_dir": str(run_dir)}


def settings_of_file(path: str | Path) -> dict[str, Any]:
    """The settings a TOML file holds, by field; unknown names are refused with the nearest one."""
    try:
        parsed = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"the settings file {path} is not there: expected a TOML file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from error
    if isinstance(parsed.get("settings"), dict) and isinstance(parsed.get("dataset"), dict):  # a run's own config.toml
        parsed = {name: value for name, value in parsed["settings"].items() if name != "run_dir"}
    found: dict[str, Any] = {}
    for key, value in parsed.items():
        entries = (
            [((key, name), inner) for name, inner in value.items()] if isinstance(value, dict) else [((key,), value)]
        )
        for names, setting in entries:
            field = _field(".".join(names), str(path))
            if field in found:
                raise ConfigError(f"{path}: {field} is set twice: keep one of them")
            found[field] = _fitted(field, setting, str(path))
    return found


def settings_of_words(assignments: Iterable[str]) -> dict[str, Any]:
    """What ``--set a.b=c`` says: values as TOML spells them, words without quotes too, and ``none``."""
    found: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, word = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise ConfigError(f"--set {assignment}: expected name=value, as in --set optimizer.learning_rate=3e-4")
        field = _field(key, "--set")
        found[field] = _from_word(field, word)
    return found


def gather(*layers: Mapping[str, Any] | None) -> TrainingConfig:
    """A config of several layers of settings, the later winning."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer or {})
    return TrainingConfig(**merged)


def run_exists(run_dir: str | Path) -> bool:
    return (Path(run_dir) / CONFIG_KEY).exists()


def _field(key: str, where: str) -> str:
    """The field a name means, with or without its table."""
    known = {field.name for field in fields(TrainingConfig)}
    section, dot, name = key.rpartition(".")
    if not dot:
        if key in known:
            return key
        spelled = sorted(known | SECTIONS.keys())
    elif section in SECTIONS:
        if name in SECTIONS[section]:
            return SECTIONS[section][name]
        home = next((table for table, names in SECTIONS.items() if name in names), None)
        if home is not None:
            raise ConfigError(
                f"{where}: {name} is not of [{section}]: expected it in [{home}], or outside of any table"
            )
        spelled = [f"{section}.{each}" for each in SECTIONS[section]]
    else:
        spelled = [f"{table}.{each}" for table, names in SECTIONS.items() for each in names]
    near = difflib.get_close_matches(key, spelled, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(spelled[:60])}"
    raise ConfigError(f"{where}: no setting is called {key}: {hint}")


def _from_word(field: str, word: str) -> Any:
    if word.lower() in ("none", "null") and type(None) in _kinds(field):
        return None
    try:
        value = tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        value = word
    if str in _kinds(field) and not isinstance(value, str) and int not in _kinds(field):
        value = word  # cuda_ids=0 is a word though it looks like a number
    return _fitted(field, value, "--set")


def _fitted(field: str, value: Any, where: str) -> Any:
    """A value of the field's kind, or a refusal."""
    kinds = _kinds(field)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) not in kinds:
        names = " or ".join(sorted("none" if kind is type(None) else kind.__name__ for kind in kinds))
        raise ConfigError(f"{where}: {field}={value!r} is of the wrong kind: expected {names}")
    return value


def _kinds(field: str) -> set[type]:
    """The plain types a field takes."""
    kinds: set[type] = set()
    waiting: list[Any] = [get_type_hints(TrainingConfig)[field]]
    while waiting:
        hint = waiting.pop()
        if get_origin(hint) in (Union, UnionType):
            waiting.extend(get_args(hint))
        elif get_origin(hint) is Literal:
            kinds |= {type(value) for value in get_args(hint)}
        else:
            kinds.add(hint)
    return kinds

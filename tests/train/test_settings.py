"""Where settings come from, and which goes before which."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from equipment.training import counting_config
from penstock.blocks import ingest
from penstock.errors import ConfigError
from penstock.train.config import TrainingConfig
from penstock.train.data import make_blocks
from penstock.train.run import run_training
from penstock.train.settings import SECTIONS, gather, settings_of_file, settings_of_run, settings_of_words


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_holds_settings_in_tables_or_without(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        'dataset_file = "a.jsonl"\nsteps = 7\n[model]\nname = "small"\n'
        "[optimizer]\nlearning_rate = 1\n[eval]\nevery = 3\n",
    )
    found = settings_of_file(path)
    assert found == {"dataset_file": "a.jsonl", "steps": 7, "model": "small", "learning_rate": 1.0, "eval_every": 3}
    assert isinstance(found["learning_rate"], float)


def test_the_later_layer_wins(tmp_path: Path) -> None:
    path = file_of(tmp_path, "batch_size = 2\nmax_seq_len = 64\nseed = 5\n")
    config = gather({"batch_size": 1, "workers": 3}, settings_of_file(path), settings_of_words(["seed=6"]), {"seed": 9})
    assert (config.batch_size, config.workers, config.max_seq_len, config.seed) == (2, 3, 64, 9)


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("optimizer.learning_rate=3e-4", "learning_rate", 3e-4),
        ("learning_rate=1", "learning_rate", 1.0),
        ("model.name=owner/name", "model", "owner/name"),
        ("cuda_ids=0", "cuda_ids", "0"),
        ("cuda_ids=0,1", "cuda_ids", "0,1"),
        ("steps=none", "steps", None),
        ("iterate=true", "iterate", True),
        ("dataset_chunk_size=auto", "dataset_chunk_size", "auto"),
        ("dataset_chunk_size=50", "dataset_chunk_size", 50),
        ('run_dir="a b"', "run_dir", "a b"),
        ("dataset_file=hf://a/b:c=d", "dataset_file", "hf://a/b:c=d"),
    ],
)
def test_a_word_sets_any_setting(word: str, field: str, value: object) -> None:
    assert settings_of_words([word]) == {field: value}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learnig_rate = 1.0\n", "no setting is called learnig_rate: did you mean learning_rate?"),
        ("[optimiser]\nbeta1 = 0.5\n", "no setting is called optimiser.beta1: did you mean optimizer.beta1?"),
        ("[optimizer]\nbatch_size = 3\n", r"batch_size is not of \[optimizer\]: expected it in \[data\]"),
        ('steps = "ten"\n', "steps='ten' is of the wrong kind: expected int or none"),
        ("iterate = 1\n", "iterate=1 is of the wrong kind: expected bool"),
        ("batch_size = true\n", "batch_size=True is of the wrong kind: expected int"),
        ("seed = 1\n[run]\nseed = 2\n", "seed is set twice"),
        ("seed = \n", "cannot be read"),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings_of_file(file_of(tmp_path, text))


def test_a_missing_file_and_a_word_without_a_value_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there: expected a TOML file"):
        settings_of_file(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="expected name=value"):
        settings_of_words(["seed"])


def test_tables_name_fields_that_exist_each_once() -> None:
    named = [field for names in SECTIONS.values() for field in names.values()]
    assert len(named) == len(set(named))
    assert set(named) <= {field.name for field in fields(TrainingConfig)}


def test_a_run_lends_the_settings_it_was_begun_with(store: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert settings_of_run(run_dir) is None
    run_training(counting_config(store, run_dir, steps=3))
    lent = settings_of_run(run_dir)
    assert lent is not None
    assert (lent["batch_size"], lent["model"], lent["steps"]) == (2, "counting", 3)
    result = run_training(gather(lent, {"steps": 5}))
    assert (result.reason, result.total_steps) == ("steps", 5)


def test_the_config_of_a_run_can_begin_another(store: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, tmp_path / "one", steps=3))
    settings = settings_of_file(tmp_path / "one" / "config.toml")
    assert "run_dir" not in settings
    result = run_training(gather(settings, {"run_dir": str(tmp_path / "two")}))
    assert result.total_steps == 3


def test_blocks_that_were_in_the_cache_are_made_again_from_what_they_were_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    config = TrainingConfig(dataset_file="a.jsonl")
    make_blocks(config)
    assert Path(config.dataset_file).is_relative_to(tmp_path / "cache")
    assert config.dataset_source == str(tmp_path / "a.jsonl")
    shutil.rmtree(tmp_path / "cache")
    before = config.dataset_file
    make_blocks(config, said=())  # as a run that is resumed lends it
    assert config.dataset_file == before
    assert Path(before, "block_manifest.json").exists()
    ingest("a.jsonl", "store")
    config.dataset_file = "store"
    make_blocks(config, said={"dataset_file"})
    assert (config.dataset_file, config.dataset_source) == ("store", "")

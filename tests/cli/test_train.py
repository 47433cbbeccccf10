"""`penstock train`: settings from everywhere, resumes that need nothing repeated, and the display."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from cli.test_commands import penstock
from equipment.training import assert_learned_exactly, make_store
from penstock.cli.main import app
from penstock.cli.progress import Tally, duration
from penstock.cli.train_flags import FLAGS
from penstock.errors import ConfigError, PenstockError
from penstock.observe.run_folder import RunFolder
from penstock.train.config import TrainingConfig

pytestmark = pytest.mark.usefixtures("forked_workers")

SEED_FLAGS = (
    *("--parallel-independent", "--ddp", "--cuda-ids", "--model", "--dataset-file", "--dataset-chunk-size", "--steps"),
    *("--batch-size", "--max-seq-len", "--gradient-accumulation-steps", "--stop-after-epoch", "--iterate"),
    *("--eval-file", "--log-file", "--halt-max-steps", "--use-chunked-training", "--chunk-size", "--cpu-offload"),
)


def invoke(*arguments: object) -> dict[str, Any]:
    """Run a training in this process; torch is here already. Returns its result."""
    done = CliRunner().invoke(app, ["train", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A settings file over a small store."""
    store = make_store(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(
        f'dataset_file = "{store}"\nsteps = 4\n[model]\nname = "counting"\n[parallel]\nmerge = "sum"\n'
        "[data]\nvocab_size = 300\ndataset_chunk_size = 5\nbatch_size = 2\nmax_seq_len = 16\n"
    )
    return path


def test_a_run_is_resumed_by_its_folder_alone(settings: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert invoke(settings, "--run", run)["total_steps"] == 4
    assert invoke("--run", run)["total_steps"] == 4
    assert invoke("--run", run, "--steps", 6)["total_steps"] == 6
    assert invoke("--run", run, "--set", "steps=none")["reason"] == "epoch"
    assert_learned_exactly(run)


def test_flags_go_before_words_and_words_before_the_file(settings: Path, tmp_path: Path) -> None:
    invoke("--config", settings, "--run", tmp_path / "run", "--set", "batch_size=3", "--set", "seed=4", "--seed", 5)
    saved = RunFolder(tmp_path / "run").settings
    assert (saved["batch_size"], saved["seed"], saved["max_seq_len"]) == (3, 5, 16)


def test_a_setting_that_shapes_the_run_cannot_be_changed_on_the_way(settings: Path, tmp_path: Path) -> None:
    invoke(settings, "--run", tmp_path / "run")
    with pytest.raises(ConfigError, match="batch_size: got 3, expected 2"):
        invoke("--run", tmp_path / "run", "--batch-size", 3)


def test_the_default_folder_is_resumed_with_its_settings_too(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = invoke(settings)["run_dir"]
    assert run == "runs/raw"
    store = RunFolder(run).settings["dataset_file"]
    assert invoke("--dataset-file", store, "--steps", 5)["total_steps"] == 5


def test_what_is_wrong_is_one_sentence_and_exit_code_1(settings: Path, tmp_path: Path) -> None:
    for arguments, told in (
        (["--set", "batchsize=3"], "no setting is called batchsize: did you mean batch_size?"),
        (["--steps", "0"], "steps=0 trains nothing"),
        (["--run", "/dev/null/x"], "the run folder /dev/null/x cannot be made: Not a directory"),
        (["--dataset-chunk-size", "many"], "dataset_chunk_size=many cannot work: expected 1 to 2147483647, or auto"),
    ):
        done = penstock("train", settings, *arguments, check=1)
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert told in done.stderr
    assert "name a data set" in penstock("train", check=1).stderr


def refused(*arguments: object) -> str:
    """What a command says that cannot be done."""
    with pytest.raises(PenstockError) as found:
        CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    return str(found.value)


def test_a_folder_without_a_run_says_so_and_one_that_lost_its_config_too(settings: Path, tmp_path: Path) -> None:
    assert "holds no run to resume: name the folder of one, or a data set" in refused("train", "--run", tmp_path / "no")
    invoke(settings, "--run", tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    told = refused("train", "--run", tmp_path / "run")
    assert "has lost its config.toml, though it has ledger.sqlite and checkpoints: restore it" in told


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(settings, "--run", tmp_path / "run", "--model", "tiny")
    for dest in ("/dev/null/x", "/proc/x", settings):
        assert f"the export folder {dest} cannot be made" in refused("export", tmp_path / "run", dest)
    monkeypatch.setenv("PENSTOCK_CACHE", "/dev/null/cache")
    (tmp_path / "raw.txt").write_text("a\nb\n")
    told = refused("train", "--dataset-file", tmp_path / "raw.txt", "--run", tmp_path / "other")
    assert "go to the cache folder /dev/null/cache, which cannot be written" in told
    assert "/dev/null: is no folder" in told
    assert "name another with PENSTOCK_CACHE" in told
    assert not (tmp_path / "other").exists()


def test_preparing_is_told_where_something_is_prepared_and_one_thing_in_the_singular(tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_text("only a line")
    words = ["train", "--run", str(tmp_path / "run"), "--vocab-size", "300", "--halt-max-steps", "3"]
    first = CliRunner().invoke(app, [*words, "--dataset-file", str(tmp_path / "raw.txt")], catch_exceptions=False)
    assert "preparing: reading the data set" in first.output
    assert "raw: 1 sample in 1 block, " in first.output
    assert "1 sample more learned" in first.output
    assert "; 1 step in all" in first.output
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "preparing:" not in again.output
    assert "resumed at step 1" in again.output


def test_every_flag_of_old_is_taken_and_every_flag_is_a_setting_with_its_default() -> None:
    told = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert all(flag in told for flag in SEED_FLAGS)
    defaults = {field.name: field.default for field in fields(TrainingConfig)}
    for flag in FLAGS:
        named = re.search(r"\(([^() ]+)\)$", flag.help)
        default = defaults[flag.name]
        assert str(default) == named.group(1) if named else default in ("", None, False), flag.name


def test_a_command_line_of_old_is_understood(tmp_path: Path) -> None:
    make_store(tmp_path)
    result = invoke(
        *("--parallel-independent", "--workers", 2, "--model", "counting", "--merge", "sum"),
        *("--dataset-file", tmp_path / "store", "--dataset-chunk-size", 5, "--steps", 6, "--batch-size", 2),
        *("--max-seq-len", 16, "--vocab-size", 300, "--gradient-accumulation-steps", 2, "--halt-max-steps", 1),
        *("--log-file", tmp_path / "metrics.jsonl", "--run", tmp_path / "run", "--stop-after-epoch"),
    )
    assert (result["reason"], result["total_steps"]) == ("steps", 6)
    events = [orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert events[0]["samples_per_block"] == 25


# -- the display -------------------------------------------------------------------------------------------------------


def started(**changes: object) -> dict[str, Any]:
    event = {"epoch": 0, "total_samples": 100, "samples_committed": 10, "total_steps": 5, "steps": None}
    return {"event": "run_started", **event, "iterate": False, **changes}


def step(number: int, worker: str = "a", **changes: object) -> dict[str, Any]:
    event = {"step": number, "epoch": 0, "loss": 2.0, "num_tokens": 50, "learning_rate": 0.1, "worker": worker}
    return {"event": "step", **event, "step_s": 0.9, "wait_s": 0.1, "samples_done": 2, "skipped": False, **changes}


def test_the_tally_tells_rate_waits_and_time_left() -> None:
    tally = Tally()
    tally.add(started(), now=100.0)
    for number in range(6, 11):
        tally.add(step(number), now=0.0)
    assert tally.learned == 20
    assert tally.wait_share == pytest.approx(0.1)
    assert tally.tokens_per_s(110.0) == pytest.approx(25.0)
    assert tally.seconds_left(110.0) == pytest.approx(80.0)  # 80 samples left at one a second
    assert tally.told(110.0) == ("epoch 0, step 10, loss 2.000, 25 tokens/s, waiting for data 10.0 %, 1 min 20 s left")


def test_time_left_goes_by_whichever_end_comes_first() -> None:
    by_steps, endless = Tally(), Tally()
    by_steps.add(started(steps=15), now=0.0)
    endless.add(started(iterate=True), now=0.0)
    for number in range(6, 11):
        by_steps.add(step(number), now=0.0)
        endless.add(step(number), now=0.0)
    assert by_steps.seconds_left(10.0) == pytest.approx(10.0)
    assert endless.seconds_left(10.0) is None


def test_what_a_lost_worker_had_learned_is_taken_back_and_commits_count_once() -> None:
    tally = Tally()
    tally.add(started(), now=0.0)
    tally.add(step(6, "a"), now=0.0)
    tally.add(step(7, "b"), now=0.0)
    tally.add({"event": "worker_lost", "worker": "b"}, now=0.0)
    assert tally.learned == 12
    tally.add({"event": "commit", "samples": 2, "workers": ["a"]}, now=0.0)
    assert tally.learned == 12
    tally.add({"event": "chunk", "worker": "a"}, now=0.0)
    assert tally.told_chunks() == "chunks: a 1"


def test_a_skipped_step_is_counted_and_has_no_loss() -> None:
    tally = Tally()
    tally.add(started(), now=0.0)
    tally.add(step(6, loss=None, skipped=True), now=0.0)
    assert tally.loss is None
    assert "1 skipped" in tally.told(1.0)


@pytest.mark.parametrize(("seconds", "told"), [(5.4, "5 s"), (65, "1 min 05 s"), (7500, "2 h 05 min")])
def test_durations_are_told_as_people_read_them(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_devices_are_another_spelling_of_cuda_ids(tmp_path: Path) -> None:
    words = ["train", "--dataset-file", "data", "--run", str(tmp_path), "--devices", "0,1"]
    with pytest.raises(ConfigError, match=r"cuda_ids='0,1' names several devices: use them with .* --streamed"):
        CliRunner().invoke(app, words, catch_exceptions=False)

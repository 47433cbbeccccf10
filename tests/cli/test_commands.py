"""The commands as a person or a script meets them."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equipment.commands import Told
from equipment.commands import penstock as run
from equipment.ranks import wait_for_steps
from equipment.training import SAMPLES, assert_learned_exactly, counting_config, make_store, start_training
from penstock.cli.main import app
from penstock.observe.run_folder import RunFolder
from penstock.storage import LocalStorage
from penstock.train.run import run_training

ROOT = Path(__file__).parents[2]


def penstock(*arguments: str | Path, check: int = 0) -> Told:
    """Run a command in a process of its own, as a shell would."""
    done = run(*arguments)
    assert done.returncode == check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A block store and a run over it, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    store = make_store(folder)
    run_training(counting_config(store, folder / "run"))
    return store, folder / "run"


def test_ingest_prints_the_manifest_and_a_second_time_says_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    first = penstock("ingest", tmp_path / "a.txt", tmp_path / "store", "--json")
    told = json.loads(first.stdout)
    assert (told["total_samples"], told["total_blocks"], told["complete"], told["dataset_name"]) == (2, 1, True, "a")
    again = penstock("ingest", tmp_path / "a.txt", tmp_path / "store")
    assert "already complete" in again.stderr


def test_an_error_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "ingest", tmp_path / "nothing.jsonl", tmp_path / "store"]
    missing = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert missing.returncode == 1
    assert missing.stdout == ""
    assert missing.stderr.splitlines() == [f"error: {tmp_path}/nothing.jsonl: no such file or folder"]
    assert not (tmp_path / "store").exists()


def test_a_bad_row_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n')
    stopped = penstock("ingest", tmp_path / "a.jsonl", tmp_path / "store", check=1)
    assert "a.jsonl:2: not JSON" in stopped.stderr
    assert "--on-bad-row skip" in stopped.stderr
    told = json.loads(
        penstock("ingest", tmp_path / "a.jsonl", tmp_path / "store", "--on-bad-row", "skip", "--json").stdout
    )
    assert (told["total_samples"], told["skipped_count"]) == (2, 1)


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    penstock("ingest", "only-one-argument", check=2)
    penstock("ingest", tmp_path, tmp_path, "--on-bad-row", "perhaps", check=2)


def test_inspect_prints_the_manifests_fields_at_top_level(finished: tuple[Path, Path]) -> None:
    told = json.loads(penstock("inspect", finished[0], "--json").stdout)
    assert told == json.loads((finished[0] / "block_manifest.json").read_text())
    assert told["total_samples"] == SAMPLES


def test_inspect_verify_names_every_bad_file_and_exits_3(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert "every file is what was written" in penstock("inspect", store, "--verify").stdout
    block = store / "blocks" / "block_00001.jsonl"
    block.write_bytes(block.read_bytes()[:-5])
    (store / "blocks" / "block_00002.idx").unlink()
    told = penstock("inspect", store, "--verify", check=3)
    assert "block_00001.jsonl" in told.stderr
    assert "block_00002.idx" in told.stderr
    damaged = json.loads(penstock("inspect", store, "--verify", "--json", check=3).stdout)["damaged"]
    assert [entry["file"] for entry in damaged] == ["blocks/block_00001.jsonl", "blocks/block_00002.idx"]


def test_a_folder_that_is_no_store_and_one_that_is_no_run_are_named(tmp_path: Path) -> None:
    assert "is not a block store" in penstock("inspect", tmp_path, check=1).stderr
    for command in ("status", "audit", "picture"):
        assert "holds no run" in penstock(command, tmp_path, check=1).stderr


def test_status_tells_where_a_run_stands(finished: tuple[Path, Path]) -> None:
    told = json.loads(penstock("status", finished[1], "--json").stdout)
    assert (told["samples_committed"], told["total_samples"], told["epoch"]) == (SAMPLES, SAMPLES, 0)
    assert told["chunks"] == {"open": 0, "leased": 0, "trained": 0, "committed": 12, "excluded": 0}
    assert f"{SAMPLES} of {SAMPLES} samples" in penstock("status", finished[1]).stdout


def test_status_tells_the_dead_from_the_living_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = start_training(counting_config(make_store(tmp_path), run, iterate=True, session_timeout_s=600.0))
    wait_for_steps(run, 3)
    living = CliRunner().invoke(app, ["status", str(run)]).output
    training.kill()
    training.join()
    dead = CliRunner().invoke(app, ["status", str(run)]).output
    assert re.search(r"worker-0 \(pid \d+\): [\d,]+ samples committed; last sign of life \d+ s ago", living)
    assert "no worker is active" not in living
    assert re.search(r"worker-0 .*; dead \(no training is under way\), last sign of life \d+ s ago", dead)
    assert f"no worker is active; `penstock train --run {run}` goes on from the last commit" in dead
    watched = CliRunner().invoke(app, ["status", str(run), "--watch", "--json"])  # which ends, as nobody is left
    assert '"dead_because": "no training is under way"' in watched.output


def test_a_worker_whose_process_is_gone_is_told_while_the_others_train(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(counting_config(make_store(tmp_path), run, steps=3))
    folder = RunFolder(run)
    generation = folder.ledger.status().generation
    folder.ledger.join("here", generation=generation, pid=os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    folder.ledger.join("gone", generation=generation, pid=gone.pid)
    with LocalStorage(run).exclusive("run", purpose="training"):
        told = CliRunner().invoke(app, ["status", str(run)]).output
    here, lost = (
        next(line for line in told.splitlines() if line.strip().startswith(f"{name} (")) for name in ("here", "gone")
    )
    assert "dead" not in here
    assert "dead (its process is gone)" in lost


def test_status_can_be_watched_while_a_run_goes_on_and_ends_with_it(tmp_path: Path) -> None:
    config = counting_config(make_store(tmp_path), tmp_path / "run", iterate=True)
    training = start_training(config)
    command = [sys.executable, "-m", "penstock", "status", str(tmp_path / "run"), "--watch", "--json"]
    try:
        while not (tmp_path / "run" / "ledger.sqlite").exists():
            assert training.is_alive()
            time.sleep(0.05)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            told = [_next_json(watching.stdout) for _ in range(3)]
            os.kill(training.pid or 0, signal.SIGTERM)
            told += list(iter(lambda: _next_json(watching.stdout), None))
            assert watching.wait(60) == 0
    finally:
        training.join(60)
    steps = [status["total_steps"] for status in told if status]
    assert steps == sorted(steps)
    assert len(steps) > 3
    assert {worker["state"] for worker in told[-1]["workers"]} == {"ended"}


def _next_json(lines: Iterable[str] | None) -> Any:
    """The next JSON object of a stream of indented ones; None at its end."""
    text = ""
    for line in lines or ():
        text += line
        if line.rstrip() == "}":
            return json.loads(text)
    return None


def test_audit_proves_the_epoch(finished: tuple[Path, Path]) -> None:
    told = json.loads(penstock("audit", finished[1], "--json").stdout)
    assert told["holds"]
    assert told["epochs"] == [
        {
            "epoch": 0,
            "samples": SAMPLES,
            "once": SAMPLES,
            "excluded": 0,
            "missing": 0,
            "twice": 0,
            "foreign": 0,
            "holds": True,
            "by_worker": {"worker-0": SAMPLES},
        }
    ]
    assert "holds" in penstock("audit", finished[1]).stdout


def test_audit_exits_3_where_a_sample_was_learned_twice(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    run_training(counting_config(store, tmp_path / "run"))
    ledger = sqlite3.connect(tmp_path / "run" / "ledger.sqlite")
    with ledger:
        ledger.execute("UPDATE spans SET chunk_id = 1, commit_seq = 99 WHERE block_id = 0 AND chunk_id = 0")
    ledger.close()
    told = json.loads(penstock("audit", tmp_path / "run", "--json", check=3).stdout)
    assert (told["epochs"][0]["missing"], told["epochs"][0]["twice"]) == (5, 5)


def test_train_runs_resumes_and_says_why_it_stopped(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    common = ["--dataset-file", store, "--run", tmp_path / "run", "--dataset-chunk-size", 5, "--batch-size", 2]
    common += ["--max-seq-len", 16, "--vocab-size", 300, "--model", "counting", "--merge", "sum"]
    arguments = [str(argument) for argument in common]
    first = penstock("train", *arguments, "--steps", "9")
    assert "the steps asked for are done (more with --steps); 9 steps in all" in first.stdout
    second = json.loads(penstock("train", *arguments, "--set", "steps=none", "--json").stdout)
    assert second["reason"] == "epoch"
    assert_learned_exactly(tmp_path / "run")


def test_sigterm_ends_a_training_committed_and_with_exit_code_0(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "penstock", "train", "--dataset-file", str(store), "--run", str(run_dir)]
    command += ["--dataset-chunk-size", "5", "--vocab-size", "300", "--max-seq-len", "16", "--iterate"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and b'"commit"' in metrics.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "asked to stop; committed first" in output
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("run_stopped", "signal")


def test_help_names_every_command_and_every_command_has_help() -> None:
    runner = CliRunner()
    overview = runner.invoke(app, ["--help"]).output
    for command in (
        "ingest",
        "inspect",
        "search",
        "tokenize",
        "bench",
        "pages",
        "exchange",
        "train",
        "status",
        "audit",
        "picture",
        "demo",
    ):
        assert command in overview
        assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_the_commands_of_the_readme_exist() -> None:
    told = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/pages.md", "docs/exchange.md")
    )
    shown = re.findall(r"^\$ penstock ((?:bench |exchange |pages )?\w+)(.*)$", told, re.MULTILINE)
    assert len(shown) >= 5
    for command, rest in shown:
        known = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        for option in re.findall(r"--[\w-]+", rest.split("#")[0]):
            assert option in known, f"penstock {command} has no {option}"
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert f"\n{target}:" in targets


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "odd[v2].txt").write_text("one\n")
    told = penstock("ingest", tmp_path / "odd[v2].txt", tmp_path / "out[v2]", "--name", "[/b]name").stdout
    assert "[/b]name" in told
    assert "out[v2]" in told


def test_ctrl_c_during_an_ingest_says_how_to_go_on(tmp_path: Path) -> None:
    with (tmp_path / "rows.txt").open("w") as file:
        file.writelines(f"row {number}\n" for number in range(2_000_000))
    command = [sys.executable, "-m", "penstock", "ingest", str(tmp_path / "rows.txt"), str(tmp_path / "store")]
    process = subprocess.Popen([*command, "--block-size", "1000"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "store" / "blocks").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted: run the same command again to go on" in told
    assert "Traceback" not in told


def test_an_audit_of_an_unfinished_epoch_does_not_hold_and_is_not_broken(tmp_path: Path) -> None:
    run_training(counting_config(make_store(tmp_path), tmp_path / "run", steps=4))
    told = json.loads(penstock("audit", tmp_path / "run", "--json").stdout)
    assert (told["holds"], told["broken"]) == (False, False)


def test_a_moved_data_set_can_be_named_to_the_audit(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    run_training(counting_config(store, tmp_path / "run"))
    store.rename(tmp_path / "moved")
    assert "if it was moved, name it with --dataset-file" in penstock("audit", tmp_path / "run", check=1).stderr
    penstock("audit", tmp_path / "run", "--dataset-file", tmp_path / "moved")
    penstock("picture", tmp_path / "run", "--dataset-file", tmp_path / "moved")


def test_a_raw_file_can_be_trained_on_and_inspecting_it_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    arguments = ("--dataset-file", tmp_path / "a.jsonl", "--run", tmp_path / "run", "--vocab-size", "300")
    told = penstock("train", *arguments, "--model", "counting", "--stop-after-epoch")
    assert "the epoch is complete" in told.stdout
    assert "holds" in penstock("audit", tmp_path / "run").stdout
    told = penstock("inspect", tmp_path / "a.jsonl", check=1).stderr
    assert f"make one of it with `penstock ingest {tmp_path}/a.jsonl DEST`" in told


def test_a_reader_of_the_progress_that_goes_away_does_not_end_a_training(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    arguments = (
        f"--dataset-file {store} --run {tmp_path / 'run'} --dataset-chunk-size 5 --vocab-size 300 --model counting"
    )
    command = f"{sys.executable} -m penstock train {arguments} 2>&1 | head -n 1"
    subprocess.run(command, shell=True, timeout=120, check=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while '"run_stopped"' not in (tmp_path / "run" / "metrics.jsonl").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_learned_exactly(tmp_path / "run")

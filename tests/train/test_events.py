"""Every event has the fields that are documented, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import orjson
import pytest

from equipment.hooks import Recorder
from equipment.training import counting_config, make_store
from penstock.observe.history import skipped_steps
from penstock.observe.run_folder import RunFolder
from penstock.train.device_batch import DeviceBatch
from penstock.train.events import EVENTS
from penstock.train.models import Transformer
from penstock.train.run import run_training

DOCS = Path(__file__).parents[2] / "docs"
STAMPS = {"event", "time", "generation"}


def fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is UnionType:
        return any(fits(value, each) for each in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(each, get_args(hint)[0]) for each in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, forked_workers: None) -> list[dict[str, Any]]:
    """What the metrics file holds after a run of two workers, one of which dies."""
    folder = tmp_path_factory.mktemp("events")
    store = make_store(folder)
    config = counting_config(store, folder / "run", model="tiny", merge="mean", eval_file=str(store))
    config.parallel_independent, config.workers = True, 2
    recorder = Recorder()
    pids: dict[str, int] = {}
    recorder.when("worker_started", 1, lambda event: pids.update(first=event["pid"]))
    recorder.when("chunk", 2, lambda _: __import__("os").kill(pids["first"], 9))
    run_training(config, [recorder])
    lines = (folder / "run" / "metrics.jsonl").read_bytes().splitlines()
    return [orjson.loads(line) for line in lines]


def test_every_kind_of_event_is_written_with_its_fields_and_no_others(written: list[dict[str, Any]]) -> None:
    assert {event["event"] for event in written} == EVENTS.keys() - {"plan"}  # of streamed runs: test_streamed_runs.py
    for event in written:
        hints = get_type_hints(EVENTS[event["event"]])
        assert event.keys() - STAMPS == hints.keys(), event["event"]
        wrong = {name: event[name] for name, hint in hints.items() if not fits(event[name], hint)}
        assert not wrong, event["event"]


def test_every_field_is_documented_with_its_event() -> None:
    text = (DOCS / "events.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for kind, shape in EVENTS.items():
        documented = set(re.findall(r"^\| `(\w+)` \|", sections[kind], re.MULTILINE))
        assert documented == set(get_type_hints(shape)), kind


def test_steps_tell_waits_rates_and_norms(written: list[dict[str, Any]]) -> None:
    for step in (event for event in written if event["event"] == "step"):
        assert step["wait_s"] >= 0
        assert step["grad_norm"] > 0 or not step["num_tokens"]
        assert step["learning_rate"] == 1e-3
        assert step["tokens_per_s"] == pytest.approx(step["num_tokens"] / (step["step_s"] + step["wait_s"]), rel=0.01)
    started = next(event for event in written if event["event"] == "run_started")
    assert (started["samples_per_block"], started["dataset_chunk_size"]) == (25, 5)


def test_a_batch_skipped_for_its_loss_is_in_the_metrics_and_in_the_audit(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Transformer.loss_sum

    def loss_sum(self: Transformer, batch: DeviceBatch, rows: slice) -> Any:
        return honest(self, batch, rows) * (float("inf") if 17 in batch.source.spans[:, 0] else 1.0)

    monkeypatch.setattr(Transformer, "loss_sum", loss_sum)
    run_dir = tmp_path / "run"
    run_training(counting_config(store, run_dir, model="tiny", merge="mean", on_nan="skip"))
    skipped = [event for event in RunFolder(run_dir).events() if event["event"] == "step" and event["skipped"]]
    assert skipped
    assert all(event["loss"] is None for event in skipped)
    assert all(any(first <= 17 < stop for first, stop in event["samples"]) for event in skipped)
    told = skipped_steps(RunFolder(run_dir))
    assert [seen.step for seen in told] == [event["step"] for event in skipped]
    assert all(seen.checkpoint_id for seen in told)

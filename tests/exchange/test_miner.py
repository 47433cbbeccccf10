"""A miner's own state: what it has not sent, what its optimizer remembers, what it sends again."""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipment.servers import S3Server
from exchange.local_run import LocalRun
from exchange.stage import store_of
from penstock.errors import ConfigError
from penstock.exchange.artifacts import unpack
from penstock.exchange.checkpoints import Checkpoint, Checkpoints
from penstock.exchange.journal import METRICS_FILE
from penstock.exchange.keys import Keys
from penstock.exchange.miner import Miner
from penstock.exchange.places import needed
from penstock.exchange.scoring import Score, as_dict
from penstock.exchange.status import read_status
from penstock.exchange.validator import Validator
from penstock.train.stopping import StopRequest

TOP = {"miners": ["a", "b"], "seats": 2, "inner": "adamw", "outer_learning_rate": 0.8, "inner_learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def mine(run: LocalRun, work: Path, windows: int) -> None:
    """Both miners up to a window, each in a thread, from what lies in their folders."""
    threads = [
        threading.Thread(
            target=Miner(run.opened, uid, work / uid, stop=StopRequest(), poll_s=0.02, until_window=windows).run
        )
        for uid in ("a", "b")
    ]
    aggregator = run.close(windows)
    for thread in threads:
        thread.start()
    for thread in (aggregator, *threads):
        thread.join(120)
        assert not thread.is_alive()


def test_a_miner_that_was_started_again_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    ended = []
    for name, stops in (("straight", (4,)), ("in pieces", (1, 3, 4))):
        run = LocalRun.begin(tmp_path / name, window_s=3600.0, **TOP)
        for windows in stops:
            mine(run, tmp_path / name / "work", windows)
        replica = run.opened.replica()
        replica.catch_up()
        assert replica.learned == 4
        ended.append(replica.weights)
    assert torch.equal(*ended)


class Killed(Exception):
    """A miner ended where it would have been killed."""


def start(run: LocalRun, work: Path) -> tuple[threading.Thread, StopRequest]:
    """Miner b for two windows, in a thread."""
    stop = StopRequest()
    miner = Miner(run.opened, "b", work, stop=stop, poll_s=0.02, until_window=2)

    def go() -> None:
        with suppress(Killed):
            miner.run()

    thread = threading.Thread(target=go)
    thread.start()
    return thread, stop


def until_sent(run: LocalRun, window: int) -> None:
    gradients, key = needed(run.opened.places.gradients), run.opened.keys.contribution("b", window)
    deadline = time.monotonic() + 60
    while not gradients.exists(key):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def close_without_b(run: LocalRun, window: int) -> None:
    """The other miner takes the only seat."""
    replica = run.opened.replica()
    replica.catch_up()
    run.contribute("a", window, replica.base, scale=3e-4, seed=window)
    run.close(window + 1).join(60)
    manifest = run.opened.chain.read(window)
    assert manifest is not None
    assert [each.uid for each in manifest.contributions] == ["a"]


@pytest.mark.parametrize("when", ["before its window is closed", "before the next is made"])
def test_what_was_not_taken_goes_back_to_the_memory_of_a_miner_that_was_started_again_too(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Miner._encode

    def killed(miner: Miner, delta: torch.Tensor, window: int, *more: Any) -> None:
        if window == 1:
            raise Killed
        encode(miner, delta, window, *more)

    sent = []
    for name in ("straight", when):
        run = LocalRun.begin(tmp_path / name, window_s=3600.0, **TOP | {"seats": 1})
        gradients, keys, work = needed(run.opened.places.gradients), run.opened.keys, tmp_path / name / "b"
        if name == "before the next is made":
            monkeypatch.setattr(Miner, "_encode", killed)
        thread, stop = start(run, work)
        until_sent(run, 0)
        if name == "before its window is closed":
            stop.set()
            thread.join(60)
        close_without_b(run, 0)
        if name == "before the next is made":
            thread.join(60)
            monkeypatch.setattr(Miner, "_encode", encode)
        if name == when:
            assert not thread.is_alive()
            thread, _ = start(run, work)
        until_sent(run, 1)
        sent.append(unpack(gradients.get(keys.contribution("b", 1)), run.opened.codec.shapes).tensors)
        close_without_b(run, 1)
        thread.join(60)
    for name, tensor in sent[0].items():
        assert np.array_equal(tensor, sent[1][name]), name


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (Score(score=0.1, windows=5, is_out=True), "out by the validator's word on window 0: its score is 0.100, far"),
        (Score(windows=5, is_out=True, flags=("samples",)), "out by the validator's word on window 0: flagged samples"),
        (Score(windows=5, absent=2), "a reserve, having missed 2 windows in a row; others had the seats"),
        (Score(score=0.5, windows=5), "it had no seat in this window"),
    ],
)
def test_a_miner_that_was_not_taken_is_told_why(tmp_path: Path, score: Score, why: str) -> None:
    run = LocalRun.begin(tmp_path, window_s=3600.0, **TOP | {"seats": 1})
    told = {"scores": as_dict({"a": Score(score=1.0, windows=5), "b": score}), "window": 0}
    for window in (0, None):
        run.opened.places.aggregator.put(run.opened.keys.scores("validator", window), json.dumps(told).encode())
    thread, stop = start(run, tmp_path / "b")
    until_sent(run, 0)
    close_without_b(run, 0)
    until_sent(run, 1)
    stop.set()
    thread.join(60)
    lines = (tmp_path / "b" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    (event,) = (event for event in map(json.loads, lines) if event["event"] == "window")
    assert not event["was_taken"]
    assert event["why"].startswith(why)


def test_a_contribution_that_is_gone_is_sent_again_once_its_window_is_open_past_its_time(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, **TOP | {"miners": ["b"], "seats": 1, "window_s": 1.0, "grace_s": 0.0})
    gradients, key = needed(run.opened.places.gradients), run.opened.keys.contribution("b", 0)
    thread, stop = start(run, tmp_path / "b")
    until_sent(run, 0)
    first = gradients.get(key)
    shutil.rmtree(tmp_path / "buckets" / "gradients")
    until_sent(run, 0)
    assert gradients.get(key) == first
    written = gradients.head(key).modified
    thread.join(1.5)
    assert gradients.head(key).modified == written  # what is there is left alone
    run.close(1).join(60)
    stop.set()
    thread.join(60)
    manifest = run.opened.chain.read(0)
    assert manifest is not None
    assert [each.uid for each in manifest.contributions] == ["b"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_goes_through_every_role(tmp_path: Path, tied: bool) -> None:
    config = {
        "model_type": "qwen2" if tied else "llama",
        "vocab_size": 420,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = LocalRun.begin(tmp_path, model=str(tmp_path / "config.json"), window_s=3600.0, **TOP)
    mine(run, tmp_path / "work", 1)
    validator = Validator(run.opened, stop=StopRequest(), work=tmp_path / "work" / "v", poll_s=0.02, until_window=1)
    assert validator.run() == 1
    manifest = run.opened.chain.read(0)
    assert manifest is not None
    assert sorted(each.uid for each in manifest.contributions) == ["a", "b"]
    assert set(read_status(run.opened.places, "run").scores) == {"a", "b"}


def test_local_steps_of_adamw_learn(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, window_s=3600.0, **TOP)
    mine(run, tmp_path / "work", 3)
    text = (tmp_path / "work" / "a" / METRICS_FILE).read_text(encoding="utf-8")
    losses = [event["loss"] for event in map(json.loads, text.splitlines()) if event["event"] == "contributed"]
    assert losses[-1] < losses[0]


def test_a_work_folder_is_one_worker_s(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, window_s=3600.0, **TOP)
    mine(run, tmp_path / "work", 1)
    miner = Miner(run.opened, "b", tmp_path / "work" / "a", stop=StopRequest(), until_window=2)
    with pytest.raises(ConfigError, match="is another worker's"):
        miner.run()
    state = tmp_path / "work" / "a" / "miner.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match=r"is damaged: .* remove it to begin with an empty memory"):
        Miner(run.opened, "a", tmp_path / "work" / "a", stop=StopRequest(), until_window=2).run()


def test_a_contribution_that_was_damaged_on_the_disk_is_told_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = LocalRun.begin(tmp_path, window_s=3600.0, **TOP)
    thread, stop = start(run, tmp_path / "b")
    until_sent(run, 0)
    stop.set()
    thread.join(60)
    gradients, key = needed(run.opened.places.gradients), run.opened.keys.contribution("b", 0)
    gradients.delete(key)
    pending = tmp_path / "b" / "contribution.safetensors"
    pending.write_bytes(pending.read_bytes()[:-1] + b"?")
    thread, stop = start(run, tmp_path / "b")
    until_sent(run, 0)
    stop.set()
    thread.join(60)
    assert "contribution.safetensors is damaged, so its window is learned again" in caplog.text
    unpack(gradients.get(key), run.opened.codec.shapes)


def test_a_large_checkpoint_goes_in_parts_and_comes_back(buckets: S3Server) -> None:
    store = store_of(buckets.url, "checkpoints", "agg")
    layout = (("first", (3_000, 1_000)), ("second", (7,)))
    checkpoints = Checkpoints(store, Keys("large"), layout)
    weights = torch.randn(3_000_007)
    assert checkpoints.write(store, Checkpoint(learned=4, base="b" * 64, weights=weights))
    assert not checkpoints.write(store, Checkpoint(learned=4, base="b" * 64, weights=weights))
    found = checkpoints.newest()
    assert torch.equal(found.weights, weights)
    assert (found.learned, found.base) == (4, "b" * 64)
    assert needed(store).head(next(iter(store.list("large/v2/00000004-"))).key).size_bytes > 12_000_000
    checkpoints.remove(store, 4)
    assert list(store.list("large/")) == []

"""A validator that is too slow, or sees too little: nobody is judged by what could not be measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from exchange.local_run import LocalRun
from penstock.exchange.data import WindowData
from penstock.exchange.members import admit
from penstock.exchange.places import needed
from penstock.exchange.scoring import Score, as_dict, from_dict
from penstock.exchange.validator import Validator
from penstock.train.stopping import StopRequest

Closes = Callable[[int], None]


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    return LocalRun.begin(tmp_path, miners=["a", "b", "c"], seats=3, window_s=3600.0, keep_contributions=2)


@pytest.fixture
def close_up_to(run: LocalRun) -> Closes:
    """Close windows with a sound contribution of each member, until so many are closed."""

    def close(windows: int) -> None:
        replica, data = run.opened.replica(), run.opened.data()
        replica.catch_up()
        while replica.learned < windows:
            for number, uid in enumerate(run.opened.settings.miners):
                contribute(run, data, uid, replica.learned, replica.base, seed=number)
            run.close(replica.learned + 1).join(60)
            replica.catch_up()
        data.close()

    return close


def contribute(run: LocalRun, data: WindowData, uid: str, window: int, base: str, seed: int) -> None:
    """What says to have read the pages that it had to."""
    run.contribute(uid, window, base, seed=seed, samples_digest=data.expected_digest(uid, window))


def validate(run: LocalRun, until_window: int) -> None:
    Validator(run.opened, stop=StopRequest(), poll_s=0.02, until_window=until_window).run()


def scores_of(run: LocalRun, window: int | None = None) -> dict[str, Score]:
    told = run.opened.places.aggregator.get(run.opened.keys.scores("validator", window))
    return from_dict(orjson.loads(told)["scores"])


def before_receiving(monkeypatch: pytest.MonkeyPatch, uid: str, window: int, act: Callable[[], Any]) -> None:
    """Have something happen before a validator reads what a member sent for a window."""
    received = Validator._received

    def acted(validator: Validator, of: str, manifest: Any, *more: Any) -> Any:
        if (of, manifest.window) == (uid, window):
            act()
        return received(validator, of, manifest, *more)

    monkeypatch.setattr(Validator, "_received", acted)


def test_what_was_taken_and_removed_before_a_slow_validator_read_it_is_no_absence(
    run: LocalRun, close_up_to: Closes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close_up_to(1)
    validate(run, 1)
    close_up_to(2)
    before_receiving(monkeypatch, "b", 1, lambda: close_up_to(4))
    validate(run, 2)
    before, after = scores_of(run, 0), scores_of(run, 1)
    assert {uid: score.windows for uid, score in after.items()} == {"a": 2, "b": 1, "c": 1}
    assert after["b"] == before["b"]
    assert [score.absent for score in after.values()] == [0, 0, 0]
    assert "window 1: what b, c sent was removed before it could be scored" in caplog.text
    assert "keep_contributions" in caplog.text


def test_nobody_is_absent_from_a_window_whose_contributions_are_no_longer_kept(
    run: LocalRun, close_up_to: Closes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even who was not taken: perhaps it sent something."""
    close_up_to(1)
    validate(run, 1)
    close_without_c(run)
    before_receiving(monkeypatch, "c", 1, lambda: close_up_to(4))
    validate(run, 2)
    assert scores_of(run, 1)["c"] == scores_of(run, 0)["c"]


def test_who_sent_nothing_is_absent(run: LocalRun, close_up_to: Closes) -> None:
    close_up_to(1)
    validate(run, 1)
    close_without_c(run)
    validate(run, 2)
    assert {uid: score.absent for uid, score in scores_of(run).items()} == {"a": 0, "b": 0, "c": 1}


def close_without_c(run: LocalRun) -> None:
    """Close window 1 while c is no member."""
    storage, keys = run.opened.places.aggregator, run.opened.keys
    admit(storage, keys, ["c"], remove=True)
    replica, data = run.opened.replica(), run.opened.data()
    replica.catch_up()
    for number, uid in enumerate(("a", "b")):
        contribute(run, data, uid, 1, replica.base, seed=number)
    data.close()
    run.close(2).join(60)
    admit(storage, keys, ["c"])


def test_what_a_miner_removed_itself_is_not_scored_and_told(
    run: LocalRun, close_up_to: Closes, caplog: pytest.LogCaptureFixture
) -> None:
    close_up_to(1)
    needed(run.opened.places.gradients).delete(run.opened.keys.contribution("b", 0))
    validate(run, 1)
    assert set(scores_of(run)) == {"a", "c"}
    assert "window 0: what b sent was taken, and is gone before its time: it is not scored" in caplog.text


def test_junk_in_the_place_of_what_was_taken_counts_as_changed(run: LocalRun, close_up_to: Closes) -> None:
    close_up_to(1)
    needed(run.opened.places.gradients).put(run.opened.keys.contribution("b", 0), b"junk")
    validate(run, 1)
    assert scores_of(run)["b"].flags == ("changed",)
    assert scores_of(run)["b"].is_out


@pytest.mark.parametrize("sent", [("a", "b"), ("a", "b", "c")])
def test_nobody_is_put_out_by_losses_in_a_window_with_too_few_to_compare(run: LocalRun, sent: tuple[str, ...]) -> None:
    known = {"a": Score(score=5.0, windows=9), "b": Score(score=-1.0, windows=9), "c": Score(score=5.0, windows=9)}
    told = orjson.dumps({"scores": as_dict(known), "window": -1})
    storage, keys = run.opened.places.aggregator, run.opened.keys
    storage.put(keys.scores("validator"), told)
    admit(storage, keys, [uid for uid in known if uid not in sent], remove=True)
    data = run.opened.data()
    for number, uid in enumerate(sent):
        contribute(run, data, uid, 0, run.opened.facts_digest, seed=number)
    data.close()
    run.close(1).join(60)
    admit(storage, keys, ["c"])
    validate(run, 1)
    assert [uid for uid, score in scores_of(run).items() if score.is_out] == (["b"] if len(sent) == 3 else [])


def test_a_validator_that_falls_behind_says_which_windows_it_left_out(
    run: LocalRun, close_up_to: Closes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close_up_to(1)
    before_receiving(monkeypatch, "c", 0, lambda: close_up_to(5))
    with caplog.at_level(logging.WARNING):
        validate(run, 5)
    told = [each for each in caplog.messages if "left out" in each]
    assert len(told) == 1
    assert told[0].startswith("windows 1 to 3 (3) were left out: ")
    for remedy in ("a faster machine", "n_pages", "random_pages", "window_s", "keep_contributions=2"):
        assert remedy in told[0]


def test_a_validator_that_begins_late_is_not_slow(
    run: LocalRun, close_up_to: Closes, caplog: pytest.LogCaptureFixture
) -> None:
    close_up_to(3)
    validate(run, 3)
    assert set(scores_of(run, 2)) == {"a", "b", "c"}
    assert "left out" not in caplog.text

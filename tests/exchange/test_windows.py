"""Windows: who is in, who fills in, what closes them, what is not even read, and how much memory it takes."""

from __future__ import annotations

import os
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from exchange.local_run import LocalRun
from exchange.material import write_config
from penstock.errors import AccessDenied, ArtifactRejected, ConfigError, ExchangeError, StorageError
from penstock.exchange.clock import StoreClock
from penstock.exchange.gathering import Gathering
from penstock.exchange.manifests import Manifest
from penstock.exchange.members import admit, read_members
from penstock.exchange.opening import begin_run, open_run, read_settings
from penstock.exchange.places import needed, store_time
from penstock.exchange.receiving import OpenWindow, Receiver
from penstock.exchange.scoring import Losses, PeerList, Score, after_window, as_dict, choose_peers, in_units, judge
from penstock.exchange.status import read_status
from penstock.exchange.validator import Validator
from penstock.storage import LocalStorage, ObjectInfo

QUICK = {"window_s": 1.0, "grace_s": 0.5}


def closed(run: LocalRun, window: int) -> Manifest:
    found = run.opened.chain.read(window)
    assert found is not None
    return found


def receiver_of(run: LocalRun) -> Receiver:
    return Receiver(needed(run.opened.places.gradients), run.opened.keys, run.opened.codec)


def whenever(run: LocalRun) -> OpenWindow:
    """The first window, open for ever."""
    return OpenWindow(window=0, base=run.opened.facts_digest, opened_at=0.0, closes_at=1e18)


def test_a_reserve_fills_in_for_a_peer_that_is_missing(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b", "c"], seats=2, **QUICK)
    for uid in ("b", "c"):
        run.contribute(uid, 0, run.opened.facts_digest)
        run.date_first(uid, 0.5)
    run.close(1).join(60)
    manifest = closed(run, 0)
    assert [(each.uid, each.is_reserve) for each in manifest.contributions] == [("b", False), ("c", True)]
    assert manifest.missing == ("a",)
    assert manifest.closed_at - manifest.opened_at >= 1.5  # the missing one was waited for


def test_a_reserve_fills_in_for_a_peer_whose_norm_is_out_of_proportion(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b", "c"], seats=2, window_s=3600.0)
    run.contribute("a", 0, run.opened.facts_digest, scale=1e30)
    run.contribute("b", 0, run.opened.facts_digest)
    thread = run.close(1)
    thread.join(1.0)
    assert thread.is_alive()  # both peers were heard, and a seat is left
    run.contribute("c", 0, run.opened.facts_digest, seed=1)
    thread.join(60)
    manifest = closed(run, 0)
    assert [each.uid for each in manifest.contributions] == ["b", "c"]
    assert [(each.uid, each.reason) for each in manifest.rejected] == [("a", "norm")]


def test_a_window_closes_at_once_when_every_seat_is_taken(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b", "c"], seats=2, window_s=3600.0)
    for uid in ("a", "b"):
        run.contribute(uid, 0, run.opened.facts_digest)
    run.close(1).join(60)
    assert [each.uid for each in closed(run, 0).contributions] == ["a", "b"]


def test_a_window_stays_open_until_enough_has_come(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2, window_s=0.5, grace_s=0.0)
    thread = run.close(1)
    thread.join(1.5)
    assert thread.is_alive()
    run.contribute("b", 0, run.opened.facts_digest)
    thread.join(60)
    manifest = closed(run, 0)
    assert [each.uid for each in manifest.contributions] == ["b"]
    assert manifest.extensions >= 1


def test_a_window_that_stays_open_tells_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2, window_s=0.5, grace_s=0.0)
    run.contribute("a", 0, run.opened.facts_digest)
    run.date_first("a", -120.0)  # as a bucket's clock would that is behind
    thread = run.close(1)
    thread.join(2.0)
    run.stop.set()
    thread.join(60)
    told = r"window 0 stays open past its time: rejected: a early \(written 120 s before .*\); nothing from: b"
    assert re.search(told, caplog.text)


def test_clocks_of_buckets_that_differ_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalRun.begin(tmp_path, miners=["a"], seats=1)
    gradients = needed(run.opened.places.gradients)
    head = gradients.head

    def behind(key: str) -> ObjectInfo:
        found = head(key)
        return replace(found, modified=str(int((store_time(found) - 300) * 1e9)))

    run.contribute("a", 0, run.opened.facts_digest)
    run.close(1).join(60)
    assert "clock" not in caplog.text
    monkeypatch.setattr(gradients, "head", behind)
    run.close(1).join(60)
    assert re.search(r"gradients is 300 s behind that of .*aggregator: contributions are judged early", caplog.text)


def test_members_by_the_thousand_are_looked_at_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = [f"m{number}" for number in range(400)]
    run = LocalRun.begin(tmp_path, miners=uids, seats=1, window_s=3600.0, keep_contributions=2)
    gradients = needed(run.opened.places.gradients)
    for name in ("head", "delete"):
        monkeypatch.setattr(gradients, name, slowly(getattr(gradients, name), 0.01))
    began = time.monotonic()
    replica = run.opened.replica()
    for window in range(3):
        replica.catch_up()
        run.contribute("m0", window, replica.base)
        run.close(window + 1).join(60)
    assert closed(run, 2).contributions
    assert not gradients.exists(run.opened.keys.contribution("m0", 0))
    assert time.monotonic() - began < 0.01 * 400 * (1 + 2 + 3 + 1)  # as long as one by one they would take


def slowly(act: Callable[[str], Any], delay_s: float) -> Callable[[str], Any]:
    def acted(key: str) -> Any:
        time.sleep(delay_s)
        return act(key)

    return acted


def test_what_comes_behind_a_window_s_time_is_late(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2)
    base = run.opened.facts_digest
    for uid in ("a", "b"):
        run.contribute(uid, 0, base)
    receiver = receiver_of(run)
    written_at = store_time(needed(run.opened.places.gradients).head(run.opened.keys.contribution("b", 0)))
    expected = OpenWindow(window=0, base=base, opened_at=0.0, closes_at=0.0)
    gathering = Gathering(receiver, expected)
    gathering.look(["b"], written_at - 1.0)
    assert not gathering.received  # nor rejected: the window may yet be made longer
    assert not gathering.rejected
    gathering.look(["b"], written_at + 1.0)
    assert list(gathering.received) == ["b"]
    gathering.look(["a", "b"], written_at - 1.0)
    gathering.reject_late()
    gathering.close()
    assert gathering.rejected["a"].reason == "late"


def test_late_is_what_was_written_after_its_window_had_closed_and_not_before(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b", "c"], seats=1, window_s=3600.0)
    run.contribute("a", 0, run.opened.facts_digest)
    run.close(1).join(60)
    closed_at = closed(run, 0).closed_at
    for uid, written_at in (("b", (int(closed_at) + closed_at) / 2), ("c", closed_at + 0.25)):
        run.contribute(uid, 0, run.opened.facts_digest)
        path = tmp_path / "buckets" / "gradients" / run.opened.keys.contribution(uid, 0)
        os.utime(path, (written_at, written_at))
    run.contribute("a", 1, closed(run, 0).digest)
    run.close(2).join(60)
    told = [(each.uid, each.window, each.reason, each.told) for each in closed(run, 1).rejected]
    assert told == [("c", 0, "late", "written 0 s after its window had closed")]


def test_what_was_received_in_time_is_not_late_however_coarse_the_store_s_clock_is(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=1, window_s=3600.0)
    for uid in ("a", "b"):
        run.contribute(uid, 0, run.opened.facts_digest)
        run.date_first(uid, 60.0)  # when the window is closed by its own clock, this is yet to come
    aggregator = run.close(2)
    run.until_closed(0)
    run.contribute("a", 1, closed(run, 0).digest)
    aggregator.join(60)
    assert closed(run, 1).rejected == ()


def test_what_came_in_the_time_that_a_window_was_given_later_is_not_late(tmp_path: Path) -> None:
    """Though nobody looked at it again: its miner is no longer expected."""
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2)
    run.contribute("b", 0, run.opened.facts_digest)
    written_at = store_time(needed(run.opened.places.gradients).head(run.opened.keys.contribution("b", 0)))
    gathering = Gathering(receiver_of(run), replace(whenever(run), closes_at=0.0))
    gathering.look(["a", "b"], written_at - 1.0)
    gathering.look(["a"], written_at + 60.0)
    gathering.reject_late()
    gathering.close()
    assert not gathering.rejected


def test_contributions_that_do_not_fit_in_memory_are_read_again(tmp_path: Path) -> None:
    uids = [f"m{number}" for number in range(6)]
    run = LocalRun.begin(tmp_path, miners=uids, seats=6, window_s=3600.0)
    for number, uid in enumerate(uids):
        run.contribute(uid, 0, run.opened.facts_digest, seed=number)
    receiver = receiver_of(run)
    sums = []
    for budget in (1 << 30, 1):
        expected = OpenWindow(window=0, base=run.opened.facts_digest, opened_at=0.0, closes_at=1e18)
        gathering = Gathering(receiver, expected, budget_bytes=budget)
        gathering.look(uids, 1e18)
        total, folded = gathering.fold(gathering.choose(uids, 6), run.opened.codec)
        gathering.close()
        assert [each.uid for each in folded] == uids
        assert any(each.artifact.tensors for each in folded) == (budget > 1)
        sums.append(total)
    assert sums[0].equal(sums[1])


@pytest.mark.parametrize("large_bytes", [0, 1 << 40], ids=["checked by the threads", "checked by the caller"])
@pytest.mark.parametrize("budget_bytes", [1, 1 << 30])
def test_many_are_judged_each_by_itself(
    large_bytes: int, budget_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.exchange.gathering._LARGE_BYTES", large_bytes)
    uids = [f"m{number}" for number in range(40)]
    run = LocalRun.begin(tmp_path, miners=uids, seats=40, window_s=3600.0)
    base = run.opened.facts_digest
    for number, uid in enumerate(uids):
        if number % 4 != 3:
            run.contribute(uid, 0, "0" * 64 if number % 4 == 1 else base, seed=number)
    gathering = Gathering(
        receiver_of(run), OpenWindow(window=0, base=base, opened_at=0.0, closes_at=1e18), budget_bytes=budget_bytes
    )
    gathering.look(uids, 1e18)
    gathering.close()
    assert sorted(gathering.received) == sorted(uids[0::4] + uids[2::4])
    assert {uid: each.reason for uid, each in gathering.rejected.items()} == dict.fromkeys(uids[1::4], "base")


def test_what_changes_between_check_and_use_is_left_out(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2, window_s=3600.0)
    base = run.opened.facts_digest
    for uid in ("a", "b"):
        run.contribute(uid, 0, base)
    receiver = receiver_of(run)
    expected = OpenWindow(window=0, base=base, opened_at=0.0, closes_at=1e18)
    gathering = Gathering(receiver, expected, budget_bytes=1)
    gathering.look(["a", "b"], 1e18)
    chosen = gathering.choose(["a", "b"], 2)
    run.contribute("a", 0, base, seed=99)
    _, folded = gathering.fold(chosen, run.opened.codec)
    gathering.close()
    assert [each.uid for each in folded] == ["b"]
    assert gathering.rejected["a"].reason == "changed"


@pytest.mark.parametrize("refusal", [AccessDenied, StorageError])
def test_an_object_that_the_store_does_not_hand_out_is_rejected_and_the_others_are_taken(
    refusal: type[StorageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2, window_s=3600.0)
    for uid in ("a", "b"):
        run.contribute(uid, 0, run.opened.facts_digest)
    for name in ("get_if", "head"):
        refuse(run, name, run.opened.keys.contribution("a", 0), refusal, monkeypatch)
    run.close(1).join(60)
    manifest = closed(run, 0)
    assert [each.uid for each in manifest.contributions] == ["b"]
    assert [(each.uid, each.reason) for each in manifest.rejected] == [("a", "unreadable")]


@pytest.mark.parametrize("refusal", [AccessDenied, StorageError])
def test_a_store_that_hands_nothing_out_is_no_contribution_s_fault(
    refusal: type[StorageError], begun: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get_if", "head", "get"):
        refuse(begun, name, "", refusal, monkeypatch)
    receiver = receiver_of(begun)
    with pytest.raises(refusal, match="refused"):
        receiver.receive("a", whenever(begun))
    with pytest.raises(refusal, match="refused"):
        receiver.look("a", 0)


def refuse(run: LocalRun, name: str, key: str, error: type[StorageError], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gradients bucket refuse a key, or all of them where it is empty."""
    storage = needed(run.opened.places.gradients)
    honest = getattr(storage, name)

    def asked(wanted: str, *more: Any) -> Any:
        if wanted.endswith(key):
            raise error("refused")
        return honest(wanted, *more)

    monkeypatch.setattr(storage, name, asked)


def test_the_first_contribution_ever_cannot_ruin_the_weights(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=2, window_s=3600.0)
    run.contribute("a", 0, run.opened.facts_digest, scale=1e30)
    thread = run.close(1)
    run.contribute("b", 0, run.opened.facts_digest)
    thread.join(60)
    manifest = closed(run, 0)
    assert [each.uid for each in manifest.contributions] == ["b"]
    assert [(each.uid, each.reason) for each in manifest.rejected] == [("a", "norm")]
    replica = run.opened.replica()
    replica.catch_up()
    assert bool(torch.isfinite(replica.weights).all())


def test_ten_gigabytes_are_refused_by_their_size_alone(begun: LocalRun) -> None:
    path = begun.folder / "buckets" / "gradients" / begun.opened.keys.contribution("giant", 0)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(10 << 30)  # nothing but holes
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactRejected, match="oversized: 10,737,418,240 bytes: expected at most"):
            receiver_of(begun).receive("giant", whenever(begun))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        path.unlink()


def test_what_is_late_is_not_read_and_not_looked_at_again(begun: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    begun.contribute("a", 0, begun.opened.facts_digest)
    asked: list[str] = []
    receiver = receiver_of(begun)
    read = receiver.read

    def counted(uid: str, expected: OpenWindow) -> tuple[memoryview, ObjectInfo] | None:
        asked.append(uid)
        return read(uid, expected)

    monkeypatch.setattr(receiver, "read", counted)
    gathering = Gathering(receiver, whenever(begun))
    for _ in range(3):
        gathering.look(["a", "b"], 1.0)
    gathering.close()
    assert sorted(asked) == ["a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"uid": "b"}, "header"),
        ({"run": "another"}, "header"),
        ({"window": 1}, "header"),
        ({"window": "0"}, "header"),
        ({"kind": ["contribution"]}, "header"),
        ({"version": None}, "header"),
        ({"base": "0" * 64}, "base"),
        ({"samples_digest": 7}, "header"),
        ({"samples_digest": "x" * 64}, "header"),
    ],
)
def test_a_header_that_tells_of_something_else_is_refused(
    header: dict[str, object], reason: str, begun: LocalRun
) -> None:
    base = begun.opened.facts_digest
    codec = begun.opened.codec
    tensors = codec.encode(torch.ones(begun.opened.facts.num_weights), codec.new_memory())
    begun.put("a", 0, base, tensors, header)
    with pytest.raises(ArtifactRejected) as error:
        receiver_of(begun).receive("a", whenever(begun))
    assert error.value.reason == reason


def _memory(run: LocalRun):
    return run.opened.codec.new_memory()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return LocalRun.begin(tmp_path_factory.mktemp("begun"), miners=["a", "b"], seats=2)


def test_other_settings_are_another_run(begun: LocalRun) -> None:
    other = write_config(begun.folder, top_k=16, chunk_side=16, miners=["a", "b"], seats=2)
    with pytest.raises(ConfigError, match="top_k: got 16, expected 8"):
        begin_run(begun.opened.places, read_settings(other))


def test_a_run_that_nobody_began_is_told(begun: LocalRun) -> None:
    with pytest.raises(ExchangeError, match="holds no run 'other': start its aggregator first"):
        open_run(begun.opened.places, "other")


def test_an_altered_aggregate_is_refused(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a"], seats=1)
    run.contribute("a", 0, run.opened.facts_digest)
    run.close(1).join(60)
    key = closed(run, 0).aggregate["key"]
    data = bytearray(run.opened.places.aggregator.get(key))
    data[-1] ^= 1
    run.opened.places.aggregator.put(key, bytes(data))
    replica = run.opened.replica()
    with pytest.raises(ExchangeError, match="the aggregate of window 0 cannot be used"):
        replica.catch_up()


def test_members_are_added_and_removed_whoever_else_does(begun: LocalRun) -> None:
    storage, keys = begun.opened.places.aggregator, begun.opened.keys
    assert admit(storage, keys, ["c", "a", "c"]) == ("a", "b", "c")
    assert admit(storage, keys, ["b"], remove=True) == ("a", "c")
    assert read_members(storage, keys) == ("a", "c")


def test_the_store_s_clock_is_asked_now_and_then(tmp_path: Path) -> None:
    counted = [0.0]
    storage = LocalStorage(tmp_path)
    clock = StoreClock(storage, "clock", ask_every_s=10.0, counting=lambda: counted[0])
    first = clock.now()
    counted[0] = 5.0
    assert clock.now() == first + 5.0
    storage.delete("clock")
    counted[0] = 10.0
    assert clock.now() >= first
    assert storage.exists("clock")


def losses(assigned_after: float, random_after: float) -> Losses:
    return Losses(
        assigned_before=5.0,
        assigned_after=assigned_after,
        assigned_aggregate=4.8,
        random_before=5.0,
        random_after=random_after,
        random_aggregate=4.8,
    )


def test_pages_without_a_token_to_predict_tell_nothing() -> None:
    nothing = dict.fromkeys(("assigned_before", "assigned_after", "assigned_aggregate"), 0.0)
    assert replace(losses(4.6, 4.8), **nothing).excess() == 0.0


def test_who_does_no_better_on_its_own_pages_is_out_in_a_few_windows() -> None:
    scores: dict[str, Score] = {}
    found = {"a": losses(4.6, 4.82), "b": losses(4.65, 4.83), "c": losses(4.55, 4.8), "copy": losses(4.82, 4.81)}
    for _ in range(3):
        assert not any(each.is_out for each in scores.values())
        units = in_units({uid: each.excess() for uid, each in found.items()})
        scores = judge({uid: scores.get(uid, Score()).after(units[uid]) for uid in found})
    assert [uid for uid, each in scores.items() if each.is_out] == ["copy"]
    again = judge({uid: each.after(1.0) for uid, each in judge(scores).items()} | {"copy": scores["copy"].after(3.0)})
    assert not again["copy"].is_out  # who does well again is back


def test_where_pages_are_alike_nobody_is_out_by_losses() -> None:
    scores = {uid: Score(score=value, windows=9) for uid, value in (("a", 0.2), ("b", -0.4), ("c", 0.1), ("d", -1.0))}
    assert not any(each.is_out for each in judge(scores).values())


def test_of_two_nobody_is_out_by_losses() -> None:
    """The bar is a share of the median, which of two is their mean: the better one alone would put the other out."""
    scores: dict[str, Score] = {}
    units = in_units({"a": 0.09, "b": 0.01})
    for _ in range(5):
        scores = judge({uid: scores.get(uid, Score()).after(units[uid]) for uid in units})
        assert not any(each.is_out for each in scores.values())
    assert judge(scores | {"b": scores["b"].after(units["b"], ("samples",))})["b"].is_out
    assert not judge(scores | {"new": Score(score=1.0, windows=1)})["b"].is_out  # it was not measured often


def test_where_fewer_than_three_are_scored_in_a_window_nobody_is_out_by_losses() -> None:
    scores = {uid: Score(score=value, windows=9) for uid, value in (("a", 1.0), ("b", 0.1), ("c", 1.2))}
    assert [uid for uid, each in judge(scores, num_scored=3).items() if each.is_out] == ["b"]
    assert not any(each.is_out for each in judge(scores, num_scored=2).values())


def test_a_flag_counts_at_once_and_fades() -> None:
    scores = judge({"a": Score().after(1.0, ("copied",)), "b": Score().after(1.0)})
    assert scores["a"].is_out
    assert scores["a"].score == -1.0
    assert not scores["b"].is_out


def test_losses_that_are_not_finite_count_as_the_worst() -> None:
    assert in_units({"a": 1.0, "b": float("nan"), "c": 1.0}) == {"a": 1.0, "b": -3.0, "c": 1.0}


def test_peers_are_the_best_of_those_that_are_there() -> None:
    scores = {
        "a": Score(score=0.5, windows=5),
        "b": Score(score=0.9, windows=5),
        "c": Score(score=0.1, windows=5, is_out=True),
        "d": Score(score=0.8, windows=5, absent=2),
    }
    chosen = choose_peers(["a", "b", "c", "d", "new"], scores, 2)
    assert chosen.peers == ("b", "a")
    assert chosen.reserves == ("new", "d")


def test_a_newcomer_is_not_absent_from_windows_that_did_not_wait_for_it() -> None:
    known = {"a": Score(score=1.0, windows=3), "gone": Score(absent=1)}
    members = ["a", "gone", "new", "late"]
    after = after_window(known, members, {"a": (1.0, ())}, without=["late"])
    assert {uid: score.absent for uid, score in after.items()} == {"a": 0, "gone": 2, "late": 1}
    assert choose_peers(members, after, 3) == PeerList(("a", "late", "new"), ("gone",))


@pytest.mark.parametrize(
    "junk",
    [
        b"not json",
        b"[" * 100_000,
        b"[1]",
        orjson.dumps({"scores": {"a": {"score": "x"}}, "window": 0}),
        orjson.dumps({"scores": {"a": {**as_dict({"a": Score()})["a"], "score": "best"}}, "window": 0}),
        orjson.dumps({"scores": {"a": {**as_dict({"a": Score()})["a"], "absent": [1]}}, "window": 0}),
    ],
)
def test_scores_that_cannot_be_read_stop_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture, junk: bytes) -> None:
    run = LocalRun.begin(tmp_path, miners=["a"], seats=1)
    run.opened.places.aggregator.put(run.opened.keys.scores("validator"), junk)
    assert read_status(run.opened.places, run.opened.keys.run).scores == {}
    with pytest.raises(ExchangeError, match=r"is damaged: .*: remove it to begin scoring anew"):
        Validator(run.opened, stop=run.stop).run()
    run.contribute("a", 0, run.opened.facts_digest)
    run.close(1).join(60)
    assert closed(run, 0).scores_window is None
    assert "cannot be used, members are taken in their order" in caplog.text


def test_scores_are_kept_with_the_window_they_are_of(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a", "b"], seats=1)
    told = {"scores": as_dict({"b": Score(score=1.0, windows=3)}), "window": 4}
    run.opened.places.aggregator.put(run.opened.keys.scores("validator"), orjson.dumps(told))
    run.contribute("b", 0, run.opened.facts_digest)
    run.close(1).join(60)
    manifest = closed(run, 0)
    assert [each.uid for each in manifest.contributions] == ["b"]
    assert manifest.scores_window == 4

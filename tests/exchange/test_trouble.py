"""Killed workers, a store that is gone, two aggregators at once, a newcomer: all recover, and no window changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from equipment.proxy import faulty_proxy
from exchange.stage import Stage, store_of
from exchange.workers import Worker
from penstock.exchange.keys import Keys
from penstock.storage import ObjectStorage


class Watch:
    """Remembers every manifest as it was first seen."""

    def __init__(self, store: ObjectStorage, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self.seen: dict[int, bytes] = {}

    def look(self) -> None:
        while self._store.exists(self._keys.manifest(len(self.seen))):
            self.seen[len(self.seen)] = self._store.get(self._keys.manifest(len(self.seen)))

    def assert_unchanged(self) -> None:
        for window, data in self.seen.items():
            assert self._store.get(self._keys.manifest(window)) == data


def assert_one_chain(run: Stage, *uids: str) -> None:
    """Every manifest builds on the one before, and every replica had its weights after every window it saw."""
    manifests = run.manifests()
    assert len(manifests) == run.windows
    for before, after in pairwise(manifests):
        assert after.base == before.digest
    for uid in uids:
        events = run.events(uid, "window")
        assert {event["window"]: event["weights"] for event in events}.items() <= {
            manifest.window: manifest.weights for manifest in manifests
        }.items()
        assert events[-1]["window"] == run.windows - 1


@contextmanager
def stopped(*workers: Worker) -> Iterator[None]:
    """While inside, processes stand still."""
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("name", "outage_s"), [("trouble", 6.0), pytest.param("long-trouble", 30.0, marks=pytest.mark.soak)]
)
def test_a_run_recovers_from_kills_an_outage_and_a_second_aggregator_and_takes_a_newcomer(
    stage: Callable[..., Stage], name: str, outage_s: float
) -> None:
    run = stage(name, windows=13, poll_s=0.2)
    watch = Watch(store_of(run.url, "aggregator"), run.keys)
    settings = {"miners": ["m0", "m1", "m2"], "seats": 4, "top_k": 64, "keep_contributions": 4}

    def until_window(window: int, *workers: Worker) -> None:
        run.until(lambda: watch.look() or len(watch.seen) > window, f"window {window}", *workers)

    with faulty_proxy(run.url) as proxy:
        run.via = proxy.url
        first = run.aggregator(**settings)
        miners = {uid: run.miner(uid) for uid in ("m0", "m1", "m2")}
        validator = run.validator()
        until_window(2, first)
        miners["m1"].kill()
        miners["m1"] = run.miner("m1")
        until_window(4, first)
        first.kill()  # in the middle of a window: the next is open once one is closed
        aggregators = [run.aggregator(name, **settings) for name in ("second", "third")]
        until_window(6, *aggregators)
        proxy.trouble.dead = True
        time.sleep(outage_s)
        proxy.trouble.dead = False
        until_window(7, *aggregators)
        with stopped(miners["m0"]):  # which is waited for: no window is closed while the newcomer starts
            run.admit("m3")
            miners["m3"] = run.miner("m3")
            sent = store_of(run.url, "gradients")
            run.until(lambda: any(sent.list(f"{run.run}/v2/m3/0")), "the newcomer's contribution", *miners.values())
        run.finish(*aggregators, *miners.values(), validator)
        watch.look()
    watch.assert_unchanged()
    assert_one_chain(run, *miners)
    manifests = run.manifests()
    assert any(each.uid == "m3" for manifest in manifests for each in manifest.contributions)
    assert run.events("m3", "started")[0]["window"] >= 8
    assert all({"m0", "m2"} <= {each.uid for each in manifest.contributions} for manifest in manifests)
    assert proxy.made["dead"] > 0
    assert_only_what_is_needed_is_kept(run)


def assert_only_what_is_needed_is_kept(run: Stage) -> None:
    """Two checkpoints, the aggregates behind the older one, the last contributions; a newcomer needs no more."""
    checkpoints = sorted(info.key for info in store_of(run.url, "checkpoints").list(f"{run.run}/v2/"))
    assert [key for key in checkpoints if key.endswith(".json")] == [run.keys.checkpoint(8), run.keys.checkpoint(12)]
    assert len(checkpoints) == 4
    aggregates = [info.key for info in store_of(run.url, "aggregator").list(f"{run.run}/v2/aggregates/")]
    assert {key.rpartition("/")[2][:8] for key in aggregates} == {f"{window:08d}" for window in range(8, 13)}
    contributions = [info.key for info in store_of(run.url, "gradients").list(f"{run.run}/v2/")]
    assert min(key.rpartition("/")[2] for key in contributions) >= "00000009"


def test_killed_at_every_fault_point_each_role_goes_on(stage: Callable[..., Stage]) -> None:
    run = stage("points", windows=9)
    settings = {"miners": ["m0", "m1"], "seats": 2, "top_k": 64, "checkpoint_every": 2, "keep_checkpoints": 8}

    def fault(point: str, nth: int) -> dict[str, str]:
        return {"PENSTOCK_FAULT": f"{point}|*|{nth}"}

    def died(worker: Worker) -> None:
        assert worker.wait(180.0) == -9, f"{worker.name} was not killed:\n{worker.told()}"

    aggregator = run.aggregator(**settings, env=fault("exchange.before_publish", 2))
    validator = run.validator(fault("exchange.before_scores", 1))
    miners = [run.miner("m0", env=fault("exchange.before_upload", 2)), run.miner("m1")]
    died(miners[0])
    miners[0] = run.miner("m0", env=fault("exchange.after_upload", 1))
    died(miners[0])
    miners[0] = run.miner("m0")
    died(aggregator)
    aggregator = run.aggregator(**settings, env=fault("exchange.after_publish", 1))
    died(aggregator)
    aggregator = run.aggregator(**settings, env=fault("exchange.before_checkpoint", 1))
    died(aggregator)
    aggregator = run.aggregator(**settings)
    died(validator)
    validator = run.validator()
    run.finish(aggregator, validator, *miners)
    assert_one_chain(run, "m0", "m1")
    for manifest in run.manifests():
        assert {each.uid for each in manifest.contributions} == {"m0", "m1"}
    store = store_of(run.url, "checkpoints")
    assert all(store.exists(run.keys.checkpoint(learned)) for learned in (0, 2, 4, 6, 8))

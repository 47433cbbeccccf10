"""Hostile miners: everything bad is rejected with its reason or scored out, and the run goes on unharmed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from exchange.enemies import OVERSIZED_BYTES, Enemies
from exchange.stage import Stage, store_of
from exchange.workers import Worker
from penstock.errors import ObjectNotFound
from penstock.exchange.opening import open_run
from penstock.exchange.scoring import Score, from_dict

HONEST = ("m0", "m1", "m2", "m3")
REJECTED = {
    "m4": ("nan", "not finite"),
    "m5": ("shape", "shape"),
    "m6": ("index", "index"),
    "m7": ("oversized", "oversized"),
    "m8": ("pickle", "malformed"),
    "m9": ("norm", "norm"),
    "m10": ("early", "early"),
    "m16": ("locked", "unreadable"),
}
CHEATING = {"m11": "copied", "m12": "twisted", "m13": "elsewhere", "m14": "samples"}
LATE = "m15"
MOST_WINDOWS = 16


def scores_of(stage: Stage) -> tuple[int, dict[str, Score]]:
    try:
        told = orjson.loads(store_of(stage.url, "aggregator").get(stage.keys.scores("validator")))
    except ObjectNotFound:
        return -1, {}
    return told["window"], from_dict(told["scores"])


def peak_bytes(pid: int) -> int:
    told = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(told.partition("VmHWM:")[2].split()[0])


def send_late(run: Stage, enemies: Enemies, window: int, *workers: Worker) -> int:
    """Upload to windows that are closed, until a manifest tells of it; returns that window."""

    def is_told() -> bool:
        nonlocal window
        if not run.chain.exists(window + 1):
            return False
        window += 1
        manifest = run.chain.read(window)
        enemies.put(LATE, window, b"too late")
        return manifest is not None and any((each.uid, each.reason) == (LATE, "late") for each in manifest.rejected)

    run.until(is_told, "a late contribution to be told", *workers)
    return window


def test_hostile_miners_are_rejected_or_scored_out_and_the_run_goes_on(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage("hostile", windows=100)
    members = [*HONEST, *REJECTED, *CHEATING, LATE]
    # Chunks of 48 x 48: 12 bits can name places that are not there.
    settings = {"miners": members, "seats": len(members), "chunk_side": 48, "top_k": 64, "keep_checkpoints": 12}
    workers = [run.aggregator(**settings), *(run.miner(uid) for uid in HONEST), run.validator()]
    enemies = Enemies(run, open_run(run.places(monkeypatch), run.run))
    enemies.replica.catch_up()
    at_first = calm = last = 0
    honest = store_of(run.url, "gradients")
    for window in range(MOST_WINDOWS):
        key = run.keys.contribution("m0", window)
        run.until(lambda key=key: honest.exists(key), f"{key}", *workers)
        run.until(lambda window=window: scores_of(run)[0] >= window - 1, f"scores of {window - 1}", *workers)
        enemies.replica.catch_up()
        if enemies.replica.learned == window:  # else it is closed by now: they are not waited for any more
            for uid, (kind, _) in REJECTED.items():
                enemies.send(uid, kind, window)
            for uid, kind in CHEATING.items():
                enemies.send(uid, kind, window)
            enemies.put(LATE, window, b"nothing")
        run.until_window(window, *workers)
        at_first = at_first or peak_bytes(workers[0].pid)
        closed = run.chain.read(window)
        assert closed is not None
        calm += {each.uid for each in closed.contributions} == set(HONEST)
        last = window
        if calm == 2:
            break
    last = send_late(run, enemies, last, *workers)
    grown = peak_bytes(workers[0].pid) - at_first
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    run.finish(*workers)

    manifests = [run.chain.read(number) for number in range(last + 1)]
    found = {(each.uid, each.reason) for manifest in manifests if manifest for each in manifest.rejected}
    assert found >= {(uid, reason) for uid, (_, reason) in REJECTED.items()} | {(LATE, "late")}
    assert not {uid for uid, _ in found} & set(HONEST)
    for manifest in manifests:
        assert manifest is not None
        taken = [each.uid for each in manifest.contributions]
        assert set(taken) >= set(HONEST)
        assert not set(taken) & {*REJECTED, LATE}
    _, scores = scores_of(run)
    assert [uid for uid in HONEST if scores[uid].is_out] == []
    assert [uid for uid in CHEATING if not scores[uid].is_out] == []
    assert manifests[-1] is not None
    assert {each.uid for each in manifests[-1].contributions} == set(HONEST)
    assert "samples" in scores["m14"].flags
    losses = [event["loss"] for event in run.events("validator", "scored")]
    assert min(losses[-2:]) < losses[0] - 0.1
    assert grown < OVERSIZED_BYTES // 2
    assert not enemies.trap.exists()

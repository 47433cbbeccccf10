"""Buckets that are deleted while a run goes on, and made again: what can be had again is, and the rest is told."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from equipment.servers import S3Server, s3_server
from exchange.local_run import LocalRun
from exchange.material import write_config
from exchange.stage import Stage, make_buckets, server_keys, store_of
from exchange.test_trouble import Watch, assert_one_chain, stopped
from exchange.workers import Nursery
from penstock.errors import ExchangeError
from penstock.exchange.opening import begin_run, open_run, read_settings
from penstock.exchange.places import open_places

MINERS = ["m0", "m1"]
SETTINGS: dict[str, Any] = {"miners": MINERS, "seats": 2, "top_k": 64, "checkpoint_every": 2, "keep_checkpoints": 2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """One of this test's own, since all others would miss their buckets."""
    with s3_server(tmp_path / "server", server_keys()) as made:
        make_buckets(made.url)
        yield made


def ask(server: S3Server, method: str, bucket: str) -> None:
    """Delete a bucket with all that is in it, or make it."""
    store = S3Store(
        bucket,
        endpoint=server.url,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    url = obstore.sign(store, method, "", timedelta(minutes=1))  # pyright: ignore[reportCallIssue, reportArgumentType]
    urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30).close()


def has_sent(run: Stage, window: int) -> bool:
    """Whether both have, and wait now."""
    return all(any(each["window"] == window for each in run.events(uid, "contributed")) for uid in MINERS)


def test_buckets_deleted_in_mid_run_and_made_again(
    server: S3Server, exchange_nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_nursery.folder = tmp_path
    run = Stage(server.url, "deleted", tmp_path, exchange_nursery, windows=9, poll_s=0.2)
    watch = Watch(store_of(run.url, "aggregator"), run.keys)
    settings: dict[str, Any] = SETTINGS | {"window_s": 3.0, "grace_s": 1.0}
    aggregator = run.aggregator(**settings)
    miners = {uid: run.miner(uid) for uid in MINERS}

    run.until_window(1, aggregator, *miners.values())
    with stopped(aggregator):  # no window is closed meanwhile
        open_window = run.chain.count()
        run.until(lambda: has_sent(run, open_window), "contributions", *miners.values())
        ask(server, "DELETE", "gradients")
    run.until(lambda: aggregator.poll() is not None, "the aggregator to end")
    assert "there is no such bucket" in aggregator.told()
    ask(server, "PUT", "gradients")
    aggregator = run.aggregator(**settings)  # miners wait: they send again what is gone
    run.until_window(4, aggregator, *miners.values())

    watch.look()
    with stopped(aggregator):
        ask(server, "DELETE", "checkpoints")
        ask(server, "PUT", "checkpoints")
    checkpoints = store_of(run.url, "checkpoints")
    run.until(lambda: any(checkpoints.list("deleted/v2/")), "another checkpoint", aggregator, *miners.values())
    run.finish(aggregator, *miners.values())
    watch.assert_unchanged()
    assert_one_chain(run, *MINERS)
    newcomer = open_run(run.places(monkeypatch), run.run).replica()
    newcomer.catch_up()
    assert (newcomer.learned, newcomer.digest) == (9, run.manifests()[-1].weights)

    run.windows = 12
    miners = {uid: run.miner(uid) for uid in MINERS}
    run.until(lambda: has_sent(run, 9), "contributions", *miners.values())
    ask(server, "DELETE", "aggregator")
    ask(server, "PUT", "aggregator")
    for miner in miners.values():
        assert miner.wait(60.0) == 1
        assert "there is no such bucket" in miner.told() or "no checkpoint is ahead of it" in miner.told()
    config = write_config(tmp_path, run=run.run, **settings)
    with pytest.raises(ExchangeError, match=r"run\.json is gone from .* its windows would be closed a second time"):
        begin_run(run.places(monkeypatch), read_settings(config))
    assert list(store_of(run.url, "aggregator").list()) == []


def test_a_run_whose_settings_are_gone_is_not_begun_a_second_time(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a"], seats=1)
    shutil.rmtree(tmp_path / "buckets" / "aggregator")
    with pytest.raises(ExchangeError, match="restore what was there, or name another run"):
        begin_run(open_places("aggregator", str(tmp_path / "buckets")), run.opened.settings)
    assert not (tmp_path / "buckets" / "aggregator").exists()


def test_an_aggregator_that_cannot_say_when_a_window_opened_says_so(tmp_path: Path) -> None:
    run = LocalRun.begin(tmp_path, miners=["a"], seats=1, checkpoint_every=1)
    run.contribute("a", 0, run.opened.facts_digest)
    run.close(1).join(60)
    run.opened.places.aggregator.delete(run.opened.keys.manifest(0))
    with pytest.raises(ExchangeError, match=r"00000000\.json is gone: nobody can say when window 1 opened: restore it"):
        run.opened.chain.written_at(0)

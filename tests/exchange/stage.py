"""A run of the exchange on a real S3 server, every worker with keys of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from equipment.buckets import PATIENT
from exchange.material import SUBFOLDER, fill_dataset, index_dataset, write_config
from exchange.workers import Nursery, Worker
from penstock.exchange.keys import Keys
from penstock.exchange.manifests import Manifest, ManifestChain
from penstock.exchange.places import Places, open_places
from penstock.storage import ObjectStorage

BUCKETS = ("dataset", "gradients", "aggregator", "checkpoints")
RUNS = ("dense", "dct", "hostile", "trouble", "long-trouble", "rights", "points", "deleted")
MINERS = tuple(f"m{number}" for number in range(17))
DEADLINE_S = 180.0


def server_keys() -> dict[str, list[str]]:
    """Who may do what: a miner writes below its name alone, a validator below its scores, readers write nothing."""
    reading = [f"{what}:{bucket}" for bucket in BUCKETS for what in ("Read", "List")]
    keys = {
        "agg": [*reading, "Write:gradients", "Write:aggregator", "Write:checkpoints"],
        "reader": [entry for entry in reading if "gradients" not in entry],
        "looker": reading,
        "val": [*reading, *(f"Write:aggregator/{run}/v2/scores/validator/*" for run in RUNS)],
    }
    for uid in MINERS:
        places = [f"gradients/{run}/v2/{uid}/*" for run in RUNS]
        keys[uid] = [f"{what}:{place}" for place in places for what in ("Write", "Read")]
    return keys


def environment(url: str, writer: str, reader: str = "reader") -> dict[str, str]:
    """What a worker's environment says of the four buckets."""
    told = {"R2_ENDPOINT_URL": url}
    for bucket in BUCKETS:
        begins = f"R2_{bucket.upper()}_"
        told[f"{begins}BUCKET_NAME"] = bucket
        for purpose, key in (("READ", reader), ("WRITE", writer)):
            told[f"{begins}{purpose}_ACCESS_KEY_ID"] = key
            told[f"{begins}{purpose}_SECRET_ACCESS_KEY"] = f"{key}-secret"
    return told


def store_of(url: str, bucket: str, key: str = "tester") -> ObjectStorage:
    options = {"endpoint": url, "access_key_id": key, "secret_access_key": f"{key}-secret"}
    return ObjectStorage.from_url(f"s3://{bucket}", options, budgets=PATIENT)


def make_buckets(url: str) -> None:
    """The buckets, and the data set in its own."""
    for bucket in BUCKETS:
        store_of(url, bucket).put("first", b"")
    dataset = store_of(url, "dataset")
    fill_dataset(dataset)
    options = {"endpoint": url, "access_key_id": "tester", "secret_access_key": "tester-secret"}
    index_dataset(ObjectStorage.from_url(f"s3://dataset/{SUBFOLDER}", options))


@dataclass
class Stage:
    """A run, its workers and what it has come to."""

    url: str
    run: str
    folder: Path
    nursery: Nursery
    windows: int = 12
    via: str = ""
    """Where workers find the store, if not at `url`."""
    poll_s: float = 0.05

    @property
    def keys(self) -> Keys:
        return Keys(self.run)

    @property
    def chain(self) -> ManifestChain:
        return ManifestChain(store_of(self.url, "aggregator"), self.keys)

    def aggregator(self, name: str = "aggregator", *, env: dict[str, str] | None = None, **settings: Any) -> Worker:
        """Start the aggregator, and wait until the run has begun."""
        config = write_config(self.folder, run=self.run, **settings)
        worker = self._start(name, "agg", "agg", ["aggregator", self.run, "--config", str(config)], env)
        checkpoints = store_of(self.url, "checkpoints")
        self.until(lambda: checkpoints.exists(self.keys.checkpoint(0)) or self._has_begun(), "the run to begin", worker)
        return worker

    def miner(self, uid: str, *more: str, env: dict[str, str] | None = None) -> Worker:
        work = str(self.folder / uid)
        args = ["miner", self.run, "--uid", uid, "--work", work, *more]
        return self._start(f"miner-{uid}", uid, "reader", args, env)

    def validator(self, env: dict[str, str] | None = None) -> Worker:
        return self._start("validator", "val", "looker", ["validator", self.run], env)

    def admit(self, uid: str) -> None:
        """Have the run's owner add a member."""
        told = environment(self.url, "agg", "agg")
        self.finish(self.nursery.start("admit", ["exchange", "admit", self.run, uid], told))

    def _start(self, name: str, writer: str, reader: str, args: list[str], env: dict[str, str] | None = None) -> Worker:
        common = [
            "--poll-s",
            str(self.poll_s),
            "--threads",
            "1",
            "--until-window",
            str(self.windows),
            "--patience-s",
            "120",
        ]
        if "--work" not in args:
            common += ["--work", str(self.folder / name)]
        told = environment(self.via or self.url, writer, reader) | (env or {})
        told["PENSTOCK_CACHE"] = str(self.folder / "caches" / name)
        return self.nursery.start(name, ["exchange", *args, *common], told)

    def _has_begun(self) -> bool:
        return self.chain.exists(0)

    def until(self, holds: Callable[[], bool], what: str, *workers: Worker) -> None:
        """Wait for something, as long as none of the workers fails."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            for worker in workers:
                assert worker.poll() in (None, 0), f"{worker.name} ended with {worker.code}:\n{worker.told()}"
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.nursery.logs()[-6000:]}"
            time.sleep(0.05)

    def until_window(self, window: int, *workers: Worker) -> None:
        self.until(lambda: self.chain.exists(window), f"window {window}", *workers)

    def finish(self, *workers: Worker) -> None:
        """Wait until workers have ended well."""
        for worker in workers:
            assert worker.wait(DEADLINE_S) == 0, f"{worker.name} ended with {worker.code}:\n{worker.told()}"

    def manifests(self) -> list[Manifest]:
        found = [self.chain.read(window) for window in range(self.windows)]
        return [manifest for manifest in found if manifest is not None]

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        events = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        return [event for event in events if event["event"] == kind]

    def places(self, monkeypatch: pytest.MonkeyPatch, writer: str = "agg", reader: str = "looker") -> Places:
        """The buckets as this process sees them."""
        for name, value in environment(self.url, writer, reader).items():
            monkeypatch.setenv(name, value)
        return open_places("aggregator")

"""Who may write what, and what nobody ever gets to see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from equipment.servers import S3Server
from exchange.stage import BUCKETS, Stage, environment, store_of
from penstock.cli.main import app
from penstock.errors import AccessDenied, ConfigError
from penstock.exchange.keys import Keys
from penstock.exchange.places import open_places

KEYS = Keys("rights")
CONTRIBUTION = KEYS.contribution("m1", 7)


@pytest.mark.parametrize(
    ("key", "bucket", "at"),
    [
        ("reader", "dataset", "anything"),
        ("reader", "aggregator", KEYS.manifest(0)),
        ("looker", "gradients", CONTRIBUTION),
        ("looker", "checkpoints", KEYS.checkpoint(4)),
        ("m0", "gradients", CONTRIBUTION),
        ("m0", "gradients", "rights/v2/m01/00000007.safetensors"),
        ("m0", "aggregator", KEYS.manifest(0)),
        ("m0", "checkpoints", KEYS.checkpoint(4)),
        ("val", "aggregator", KEYS.manifest(0)),
        ("val", "gradients", CONTRIBUTION),
    ],
)
def test_nobody_writes_what_is_another_s(buckets: S3Server, key: str, bucket: str, at: str) -> None:
    owner = store_of(buckets.url, bucket)
    owner.put(at, b"as it was")
    store = store_of(buckets.url, bucket, key)
    for write in (store.put, store.put_if_absent, lambda key, _: store.delete(key)):
        with pytest.raises(AccessDenied):
            write(at, b"overwritten")
    assert owner.get(at) == b"as it was"
    owner.delete(at)


def test_everybody_writes_what_is_theirs(buckets: S3Server) -> None:
    store_of(buckets.url, "gradients", "m1").put(CONTRIBUTION, b"")
    store_of(buckets.url, "gradients", "agg").delete(CONTRIBUTION)
    store_of(buckets.url, "aggregator", "val").put(KEYS.scores("validator", 3), b"")


def test_a_name_cannot_lead_elsewhere() -> None:
    for name in ("../m1", "m1/..", "", "m 1", "m1.", "x" * 64):
        with pytest.raises(ConfigError, match="is no name"):
            Keys("run").contribution(name, 0)
        with pytest.raises(ConfigError, match="is no name"):
            Keys(name)


def test_what_is_missing_in_the_environment_is_named_for_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment("http://127.0.0.1:9", "key"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as error:
        open_places("miner")
    assert "R2_GRADIENTS_WRITE_ACCESS_KEY_ID is not set" in str(error.value)
    assert "R2_GRADIENTS_READ" not in str(error.value)
    assert "R2_AGGREGATOR_READ_ACCESS_KEY_ID is not set" in str(error.value)


def texts_under(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_no_secret_appears_anywhere(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stage("rights", windows=2)
    loud = {"LOG_ALL": "1"}
    aggregator = run.aggregator(miners=["m0", "m1"], seats=2, top_k=64, env=loud)
    wrong = environment(run.url, "m0") | loud
    wrong["R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY"] = "another-secret"
    locked_out = run.miner("m0", env=wrong)
    assert locked_out.wait(120.0) == 1
    assert "the store refused" in locked_out.told()
    run.finish(aggregator, run.miner("m0", env=loud), run.miner("m1", env=loud), run.validator(loud))
    for name, value in environment(run.url, "agg", "looker").items():
        monkeypatch.setenv(name, value)
    app(["exchange", "status", "rights"], standalone_mode=False)
    printed = capsys.readouterr()
    stored = b"".join(
        store_of(run.url, bucket).get(info.key)
        for bucket in BUCKETS
        for info in store_of(run.url, bucket).list("rights/")
    )
    everything = texts_under(run.folder) + stored + printed.out.encode() + printed.err.encode()
    assert b"INFO" in everything  # the logs were as loud as they can be
    for key in ("agg", "reader", "looker", "val", "m0", "m1"):
        assert f"{key}-secret".encode() not in everything
    assert b"another-secret" not in everything

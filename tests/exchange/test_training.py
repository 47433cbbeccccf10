"""Four miners, a validator and an aggregator learn as ordinary data parallelism does, with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from exchange.stage import Stage, store_of
from penstock.exchange.layout import digest_of
from penstock.exchange.opening import open_run
from penstock.train.device_batch import to_device

MINERS = ("m0", "m1", "m2", "m3")


def run_all(stage: Stage, **settings: Any) -> None:
    aggregator = stage.aggregator(**settings)
    miners = [stage.miner(uid) for uid in MINERS]
    stage.finish(aggregator, *miners, stage.validator())


def ordinary_losses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What each miner's pages would have cost in ordinary data parallelism: one process, gradients averaged, SGD."""
    opened = open_run(stage.places(monkeypatch), stage.run)
    data = opened.data()
    model, vector = opened.model()
    vector.write(opened.checkpoints.read(0).weights)
    rate = opened.settings.outer_learning_rate
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses: dict[str, list[float]] = {uid: [] for uid in MINERS}
    for window in range(stage.windows):
        optimizer.zero_grad()
        for uid in MINERS:
            batches = [to_device(batch, torch.device("cpu")) for batch in data.assigned(uid, window).batches]
            tokens = sum(batch.num_tokens for batch in batches)
            loss = torch.stack([model.loss_sum(batch, slice(0, len(batch))) for batch in batches]).sum() / tokens
            (loss / len(MINERS)).backward()
            losses[uid].append(float(loss.detach()))
        optimizer.step()
    data.close()
    return losses


def told_losses(stage: Stage) -> dict[str, list[float]]:
    return {uid: [event["loss"] for event in stage.events(uid, "contributed")] for uid in MINERS}


def assert_same_bits_everywhere(stage: Stage) -> None:
    manifests = stage.manifests()
    assert [manifest.window for manifest in manifests] == list(range(stage.windows))
    expected = [manifest.weights for manifest in manifests]
    for uid in MINERS:
        assert [event["weights"] for event in stage.events(uid, "window")] == expected
    assert len(set(expected)) == stage.windows  # every window changed something


def test_dense_contributions_learn_what_data_parallelism_learns(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage("dense")
    run_all(run, codec="dense", aggregate_codec="dense", keep_checkpoints=12)
    expected = ordinary_losses(run, monkeypatch)
    for uid, losses in told_losses(run).items():
        assert losses == pytest.approx(expected[uid], abs=1e-5)
    assert min(expected["m0"][-3:]) < expected["m0"][0] - 0.5  # there was something to learn
    assert_same_bits_everywhere(run)
    assert_replayed_from_the_first_checkpoint(run, monkeypatch)


def assert_replayed_from_the_first_checkpoint(run: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes later and does the arithmetic by other means gets the same weights after every window."""
    from safetensors.numpy import load

    opened = open_run(run.places(monkeypatch), run.run)
    weights = opened.checkpoints.read(0).weights.numpy().copy()
    store = store_of(run.url, "aggregator")
    for manifest in run.manifests():
        weights = weights - load(store.get(manifest.aggregate["key"]))["change"]
        assert digest_of(torch.from_numpy(weights.astype(np.float32))) == manifest.weights


def test_compressed_contributions_learn_about_as_much(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage("dct")
    run_all(run, codec="dct", top_k=64, keep_checkpoints=12)
    expected = ordinary_losses(run, monkeypatch)
    last = {uid: float(np.mean(losses[-3:])) for uid, losses in told_losses(run).items()}
    for uid, loss in last.items():
        assert loss <= 1.1 * float(np.mean(expected[uid][-3:]))
    assert_same_bits_everywhere(run)
    dense_bytes = 4 * open_run(run.places(monkeypatch), run.run).facts.num_weights
    sizes = [each.size_bytes for manifest in run.manifests() for each in manifest.contributions]
    assert len(sizes) == 4 * run.windows
    assert max(sizes) * 50 <= dense_bytes
    scores = store_of(run.url, "aggregator").get(run.keys.scores("validator"))
    assert b'"is_out":true' not in scores

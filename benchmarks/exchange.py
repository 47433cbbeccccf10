"""What the exchange costs: bytes, encoding and decoding against a window's compute, and the gather of 16 peers.

    python benchmarks/exchange.py [--rounds 5]

The model is the built-in `small` one (13 million weights) on the CPU, the store a SeaweedFS on loopback. The gather
reads and checks 16 contributions of 10 million weights; the limit it is measured by reads the same objects with as many
threads and throws them away. Both are taken in turns. Adding up, which begins when a window closes, is told beside it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from equipment.servers import s3_server
from penstock.exchange.artifacts import pack, unpack
from penstock.exchange.codec import AggregateCodec, ContributionCodec, DenseCodec, SparseCodec
from penstock.exchange.gathering import Gathering
from penstock.exchange.keys import VERSION, Keys
from penstock.exchange.layout import WeightVector
from penstock.exchange.learning import LocalLearner
from penstock.exchange.receiving import OpenWindow, Receiver
from penstock.exchange.settings import ExchangeSettings
from penstock.feed import Batch
from penstock.feed.packing import pack_window
from penstock.storage import ObjectStorage
from penstock.train.models import build_model

PEERS = [f"peer{number}" for number in range(16)]
BASE = "0" * 64
KEYS = Keys("bench")


def median_s(work: Callable[[], Any], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def batches(count: int) -> list[Batch]:
    ids = np.random.default_rng(0).integers(0, 4096, count * 8 * 256)
    packed = pack_window(ids, np.array([0, len(ids)]), first_sample_id=0, sequence_length=256, pad_id=0)
    return list(packed.batches(8))


def compression(rounds: int) -> int:
    """Sizes and times of each codec on the model's gradient; returns how many weights it has."""
    settings = ExchangeSettings(run="bench", model="small", inner="gradient")
    model = build_model("small", vocab_size=4096, total_samples=0)
    vector = WeightVector(model.network)
    learner = LocalLearner(model, vector, settings, torch.device("cpu"))
    few = batches(2)
    weights = vector.read()
    work = learner.learn(weights, few, lambda: True)
    assert work is not None
    compute_s = median_s(lambda: learner.learn(weights, few, lambda: True), rounds) / len(few)
    dense_bytes = 4 * vector.count
    print(f"{vector.count:,} weights, {dense_bytes:,} bytes dense; a batch of 2,048 tokens computes {compute_s:.2f} s")
    codecs: dict[str, ContributionCodec] = {"dense": DenseCodec(vector.count)}
    for top_k in (64, 128):
        for name in ("topk", "dct"):
            codecs[f"{name} {top_k}/4096"] = SparseCodec(
                vector.count, side=64, top_k=top_k, momentum=0.999, transform=name == "dct"
            )
    for name, codec in codecs.items():
        report(name, codec, work.delta, compute_s, dense_bytes, rounds)
    aggregate = AggregateCodec(vector.count, eight_bit=True)
    data = pack({}, aggregate.encode(work.delta))[1]
    applied_s = median_s(lambda: aggregate.apply(weights, unpack(data, aggregate.shapes).tensors), rounds)
    ratio = dense_bytes / len(data)
    print(f"aggregate in 8 bits: {len(data):,} bytes, 1/{ratio:.1f} of dense, applied in {applied_s:.3f} s")
    return vector.count


def report(
    name: str, codec: ContributionCodec, delta: torch.Tensor, compute_s: float, dense_bytes: int, rounds: int
) -> None:
    memory = codec.new_memory()
    data = pack({"kind": "contribution"}, codec.encode(delta, memory))[1]
    encode_s = median_s(lambda: pack({"kind": "contribution"}, codec.encode(delta, memory)), rounds)

    def decode() -> None:
        tensors = unpack(data, codec.shapes).tensors
        codec.check(tensors)
        total = codec.new_total()
        codec.fold(total, tensors)
        codec.finish(total, 1.0)

    decode_s = median_s(decode, rounds)
    share = 100 * (encode_s + decode_s) / (32 * compute_s)
    print(
        f"{name:14s} {len(data):>11,} bytes  1/{dense_bytes / len(data):<6.1f} encode {encode_s:.3f} s  decode "
        f"{decode_s:.3f} s  {share:.2f} % of a window of 32 such batches"
    )


def gather(count: int, store: ObjectStorage, kind: str, rounds: int) -> None:
    codec: ContributionCodec = DenseCodec(count)
    if kind != "dense":
        codec = SparseCodec(count, side=64, top_k=64, momentum=0.999, transform=True)
    for number, uid in enumerate(PEERS):
        change = torch.randn(count, generator=torch.Generator().manual_seed(number))
        told = {"kind": "contribution", "version": VERSION, "run": "bench", "uid": uid, "window": 0, "base": BASE}
        data = pack({**told, "samples_digest": BASE}, codec.encode(change, codec.new_memory()))[1]
        store.put(KEYS.contribution(uid, 0), data)
    size = sum(store.head(KEYS.contribution(uid, 0)).size_bytes for uid in PEERS)
    receiver = Receiver(store, KEYS, codec)

    def read_alone() -> None:
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda uid: len(store.get(KEYS.contribution(uid, 0))), PEERS):
                pass

    def gather_all() -> Gathering:
        expected = OpenWindow(window=0, base=BASE, opened_at=0.0, closes_at=1e18)
        gathering = Gathering(receiver, expected, budget_bytes=2 << 30)
        gathering.look(PEERS, 1e18)
        assert len(gathering.received) == 16, gathering.rejected
        return gathering

    alone: list[float] = []
    whole: list[float] = []
    read_alone()
    for _ in range(rounds):
        alone.append(median_s(read_alone, 1))
        whole.append(median_s(lambda: gather_all().close(), 1))
    gathering = gather_all()
    added_s = median_s(lambda: gathering.fold(gathering.choose(PEERS, 16), codec), rounds)
    gathering.close()
    read_s, gathered_s = statistics.median(alone), statistics.median(whole)
    share = statistics.median(read / gathered for read, gathered in zip(alone, whole, strict=True))
    print(
        f"gather of 16 {kind}: {size:,} bytes; store alone {size / read_s / 1e6:.0f} MB/s, gathered "
        f"{size / gathered_s / 1e6:.0f} MB/s: {read_s / gathered_s:.2f} of it, {share:.2f} in the median of pairs; "
        f"added up in {added_s:.3f} s"
    )


def memory(count: int, store: ObjectStorage, budget_bytes: int) -> None:
    """How much the peak grows while 16 dense contributions are gathered within a budget."""
    codec = DenseCodec(count)
    receiver = Receiver(store, KEYS, codec)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    expected = OpenWindow(window=0, base=BASE, opened_at=0.0, closes_at=1e18)
    gathering = Gathering(receiver, expected, budget_bytes=budget_bytes)
    gathering.look(PEERS, 1e18)
    gathering.fold(gathering.choose(PEERS, 16), codec)
    gathering.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(
        f"memory for 16 x {receiver.limit_bytes / 1e6:.0f} MB within {budget_bytes / 1e6:.0f} MB: the peak grew by "
        f"{grown / 1e6:.0f} MB, the sum of {4 * count / 1e6:.0f} MB included"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with TemporaryDirectory() as folder, s3_server(Path(folder) / "server") as server:
        store = ObjectStorage.from_url(
            "s3://gradients",
            {"endpoint": server.url, "access_key_id": server.access_key, "secret_access_key": server.secret_key},
        )
        count = 10_000_000
        codec = DenseCodec(count)
        for uid in PEERS:
            told = {"kind": "contribution", "version": VERSION, "run": "bench", "uid": uid, "window": 0, "base": BASE}
            data = pack({**told, "samples_digest": BASE}, codec.encode(torch.ones(count), codec.new_memory()))[1]
            store.put(KEYS.contribution(uid, 0), data)
        memory(count, store, 256 << 20)
        gather(count, store, "compressed", rounds)
        gather(count, store, "dense", rounds)
    compression(min(3, rounds))


if __name__ == "__main__":
    main()

"""Compression: what is not sent now is sent later, bytes are counted exactly, and what is wrong is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import ArtifactRejected
from penstock.exchange.artifacts import pack, unpack
from penstock.exchange.bits import pack_bits
from penstock.exchange.codec import AggregateCodec, ContributionCodec, DenseCodec, SparseCodec

COUNT = 10_000


def codec_of(kind: str, *, count: int = COUNT, side: int = 32, top_k: int = 32, momentum: float = 1.0) -> SparseCodec:
    return SparseCodec(count, side=side, top_k=top_k, momentum=momentum, transform=kind == "dct")


def decoded(codec: ContributionCodec, tensors: dict[str, np.ndarray]) -> torch.Tensor:
    total = codec.new_total()
    codec.fold(total, tensors)
    return codec.finish(total, 1.0)


@pytest.mark.parametrize("kind", ["dct", "topk"])
@pytest.mark.parametrize(("count", "side", "top_k"), [(10_000, 32, 32), (1_000, 7, 8), (1, 16, 16), (4_096, 64, 64)])
def test_nothing_is_lost_only_late(kind: str, count: int, side: int, top_k: int) -> None:
    codec = codec_of(kind, count=count, side=side, top_k=top_k)
    memory = codec.new_memory()
    change = torch.randn(count, generator=torch.Generator().manual_seed(1))
    received = torch.zeros(count)
    for window in range(150):
        tensors = codec.encode(change if window == 0 else torch.zeros(count), memory)
        codec.check(tensors)
        received += decoded(codec, tensors)
    assert received == pytest.approx(change, abs=1e-4)


def test_smooth_changes_survive_the_transform_better_than_picking_values() -> None:
    change = torch.sin(torch.arange(COUNT) / 50.0)
    lost = {}
    for kind in ("dct", "topk"):
        codec = codec_of(kind)
        lost[kind] = float((change - decoded(codec, codec.encode(change, codec.new_memory()))).norm())
    assert lost["dct"] < lost["topk"] / 2


def test_momentum_forgets_what_was_not_sent() -> None:
    codec = codec_of("topk", momentum=0.5)
    memory = codec.new_memory()
    codec.encode(torch.ones(COUNT), memory)
    left = float(memory.norm())
    codec.encode(torch.zeros(COUNT), memory)
    assert float(memory.norm()) < left / 2


def test_bytes_are_counted_exactly() -> None:
    """10 M weights in chunks of 4,096: 64 values of 8 bits, 64 places of 12 bits and a scale of 32 bits each."""
    count = 10_000_000
    codec = codec_of("dct", count=count, side=64, top_k=64)
    tensors = codec.encode(torch.randn(count), codec.new_memory())
    payload = sum(array.nbytes for array in tensors.values())
    assert payload == -(-count // 4096) * (64 + 64 * 12 // 8 + 4)
    _, data = pack({"kind": "contribution"}, tensors)
    assert len(data) - payload < 512
    assert len(data) * 50 <= 4 * count
    assert len(data) * 99 <= 4 * count


def test_contributions_add_up_in_any_number() -> None:
    codec = codec_of("dct")
    total = codec.new_total()
    expected = torch.zeros(COUNT)
    for seed in range(5):
        change = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))
        tensors = codec.encode(change, codec.new_memory())
        codec.fold(total, unpack(pack({}, tensors)[1], codec.shapes).tensors)
        expected += decoded(codec, tensors)
    assert codec.finish(total, 0.2) == pytest.approx(0.2 * expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["dct", "topk"])
def test_the_norm_is_that_of_what_is_decoded(kind: str) -> None:
    codec = codec_of(kind, count=8 * 1024)  # of a part of a chunk some is cut off
    tensors = codec.encode(torch.randn(8 * 1024), codec.new_memory())
    assert codec.check(tensors) == pytest.approx(float(decoded(codec, tensors).norm()), rel=1e-4)


def test_places_that_are_not_there_are_refused() -> None:
    codec = codec_of("dct", side=48, top_k=8)  # 2,304 values: 12 bits can name more
    tensors = codec.encode(torch.randn(COUNT), codec.new_memory())
    rows = len(tensors["values"])
    outside = pack_bits(np.tile(np.arange(2298, 2306), (rows, 1)), 12)
    with pytest.raises(ArtifactRejected, match="index: place 2305 of a chunk of 2304"):
        codec.check({**tensors, "places": outside})
    for value in (0, 255):
        with pytest.raises(ArtifactRejected, match="index: places of a chunk that do not go up"):
            codec.check({**tensors, "places": np.full_like(tensors["places"], value)})


def test_a_place_behind_the_last_weight_is_refused() -> None:
    codec = codec_of("topk", count=1_000, side=32, top_k=8)
    tensors = codec.encode(torch.zeros(1_000), codec.new_memory())
    places = np.arange(1016, 1024)[None]
    hostile = {**tensors, "places": pack_bits(places, 10), "values": np.ones((1, 8), np.int8)}
    with pytest.raises(ArtifactRejected, match="a place behind the last of 1000 weights"):
        codec.check({**hostile, "scales": np.ones(1, np.float32)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_are_refused(value: float) -> None:
    codec = codec_of("dct")
    tensors = codec.encode(torch.randn(COUNT), codec.new_memory())
    tensors["scales"][3] = value
    with pytest.raises(ArtifactRejected):
        codec.check(tensors)


def test_huge_scales_overflow_nothing() -> None:
    codec = codec_of("dct")
    tensors = codec.encode(torch.randn(COUNT), codec.new_memory())
    tensors["scales"][:] = np.float32(1e33)
    assert codec.check(tensors) > 1e33  # a number, to be judged by its size


def test_dense_values_are_checked_too() -> None:
    codec = DenseCodec(4)
    assert codec.check({"values": np.array([3, 0, 4, 0], np.float32)}) == 5.0
    with pytest.raises(ArtifactRejected, match="not finite"):
        codec.check({"values": np.array([3, 0, np.nan, 0], np.float32)})


@pytest.mark.parametrize("eight_bit", [True, False])
def test_an_aggregate_is_applied_as_it_was_published(eight_bit: bool) -> None:
    codec = AggregateCodec(1_000, eight_bit=eight_bit)
    weights, change = torch.randn(1_000), 0.01 * torch.randn(1_000)
    data = pack({}, codec.encode(change))[1]
    one, two = weights.clone(), weights.clone()
    for replica in (one, two):
        codec.apply(replica, unpack(data, codec.shapes).tensors)
    assert torch.equal(one, two)
    assert (weights - one) == pytest.approx(change, abs=2e-4)
    assert len(data) < (1_500 if eight_bit else 4_500)


def test_scales_that_make_more_than_fp32_holds_are_refused() -> None:
    codec = codec_of("dct")
    tensors = codec.encode(torch.randn(COUNT), codec.new_memory())
    with pytest.raises(ArtifactRejected, match="norm: its norm is more than fp32 holds"):
        codec.check({**tensors, "scales": np.full_like(tensors["scales"], 3e38)})

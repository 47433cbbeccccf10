"""Artifacts: what comes out is what went in, and nothing else comes in."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from penstock.errors import ArtifactRejected
from penstock.exchange.artifacts import largest, pack, unpack
from penstock.exchange.bits import bits_for, numbers_of, pack_bits, packed_bytes, rising, unpack_planes

TENSORS = {
    "values": np.arange(24, dtype=np.int8).reshape(3, 8),
    "scales": np.array([0.5, 1.5, -2.0], np.float32),
    "places": np.arange(36, dtype=np.uint8).reshape(3, 12),
}
SHAPES = {"values": ("I8", (3, 8)), "scales": ("F32", (3,)), "places": ("U8", (3, 12))}
HEADER = {"kind": "contribution", "window": 3}
DIGEST, WHOLE = pack(HEADER, TENSORS)


def test_an_artifact_comes_out_as_it_went_in() -> None:
    found = unpack(WHOLE, SHAPES)
    assert found.header == HEADER
    assert found.digest == DIGEST
    for name, array in TENSORS.items():
        assert np.array_equal(found.tensors[name], array)
    assert len(WHOLE) <= largest(SHAPES)


def test_a_header_nested_too_deep_is_rejected() -> None:
    nested: object = 1
    for _ in range(600):
        nested = [nested]
    told = json.dumps({"__metadata__": {"penstock": json.dumps({"deep": nested, "digest": "0" * 64})}}).encode()
    with pytest.raises(ArtifactRejected, match="malformed"):
        unpack(len(told).to_bytes(8, "little") + told, {})


def test_a_single_number_stays_one() -> None:
    number = np.array(7.0, np.float32)
    assert unpack(pack({}, {"step": number})[1], {"step": ("F32", ())}).tensors["step"].shape == ()


def test_others_read_it_as_safetensors() -> None:
    found = load(WHOLE)
    for name, array in TENSORS.items():
        assert np.array_equal(found[name], array)


@settings(max_examples=400)
@given(place=st.integers(0, len(WHOLE) - 1), value=st.integers(0, 255))
def test_a_byte_that_is_another_is_noticed(place: int, value: int) -> None:
    changed = bytearray(WHOLE)
    changed[place] = value
    if bytes(changed) == WHOLE:
        return
    try:
        found = unpack(bytes(changed), SHAPES)
    except ArtifactRejected:
        return
    # White space of the JSON is all that may differ.
    assert found.header == HEADER
    assert all(np.array_equal(found.tensors[name], array) for name, array in TENSORS.items())


@settings(max_examples=300)
@given(data=st.binary(max_size=300) | st.binary(max_size=300).map(lambda end: WHOLE[:150] + end))
def test_whatever_comes_is_rejected_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(ArtifactRejected):
        unpack(data, SHAPES)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "malformed"),
        (WHOLE[:-1], "malformed"),
        (WHOLE + b"x", "malformed"),
        (pickle.dumps(TENSORS), "malformed"),
        (pack(HEADER, {**TENSORS, "values": TENSORS["values"][:2]})[1], "shape"),
        (pack(HEADER, {**TENSORS, "values": TENSORS["values"].astype(np.float32)})[1], "shape"),
        (pack(HEADER, {**TENSORS, "more": TENSORS["values"]})[1], "shape"),
        (pack(HEADER, {"values": TENSORS["values"]})[1], "shape"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "malformed"),
        ((2).to_bytes(8, "little") + b"[]", "malformed"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "malformed"),
    ],
)
def test_each_fault_has_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ArtifactRejected) as error:
        unpack(data, SHAPES)
    assert error.value.reason == reason


@given(bits=st.integers(1, 16), count=st.integers(1, 200), seed=st.integers(0, 99))
def test_packed_numbers_come_back(bits: int, count: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, count)
    packed = pack_bits(numbers, bits)
    assert packed.shape == (packed_bytes(count, bits),)
    assert np.array_equal(numbers_of(unpack_planes(packed, count, bits)), numbers)


@pytest.mark.parametrize("bits", range(1, 17))
def test_packed_numbers_take_their_bits_and_no_more(bits: int) -> None:
    assert packed_bytes(8 * 1_000, bits) == 1_000 * bits
    assert packed_bytes(1, bits) <= len(bin(bits)) - 2 + 1  # a byte for each plane


@given(
    bits=st.sampled_from([5, 8, 10, 12, 16]),
    rows=st.integers(1, 4),
    count=st.integers(1, 17),
    exchanged=st.integers(0, 200),
    seed=st.integers(0, 9),
)
def test_numbers_that_go_up_are_told_from_others(bits: int, rows: int, count: int, exchanged: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    numbers = np.stack([np.sort(drawn.choice(1 << bits, count, replace=False)) for _ in range(rows)])

    def go_up() -> bool:
        return rising(unpack_planes(pack_bits(numbers, bits), numbers.size, bits), count)

    assert go_up()
    if count > 1:
        row, place = exchanged % rows, exchanged % (count - 1)
        numbers[row, place + exchanged % 2] = numbers[row, place + 1 - exchanged % 2]  # twice the same
        assert not go_up()
        numbers[row] = numbers[row, ::-1]
        assert not go_up()


@given(bits=st.integers(1, 16), row=st.integers(1, 6), data=st.binary(min_size=48, max_size=48))
def test_any_bytes_are_judged_as_the_numbers_that_they_are(bits: int, row: int, data: bytes) -> None:
    count = 48 * 8 // bits // row * row
    planes = unpack_planes(np.frombuffer(data, np.uint8), count, bits)
    numbers = numbers_of(planes).reshape(-1, row)
    assert rising(planes, row) == bool((np.diff(numbers.astype(np.int64), axis=1) > 0).all())


def test_bits_are_enough_and_no_more() -> None:
    assert [bits_for(count) for count in (1, 2, 3, 4096, 4097)] == [1, 1, 2, 12, 13]

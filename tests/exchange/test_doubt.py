"""Contributions of any kind, made up at random: each is refused by name, or is what it says; nothing else happens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArtifactRejected
from penstock.exchange.artifacts import pack, unpack
from penstock.exchange.codec import SparseCodec

ODD_SCALES = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, -1e-45, 3.4e38, 1e30, -1.0]
CODECS = [
    SparseCodec(count, side=side, top_k=8, momentum=0.9, transform=transform)
    for side in (3, 5, 16, 48)
    for count in (1, side * side, side * side + 1, 3 * side * side - 1)
    for transform in (True, False)
]
VALUES = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
ANYTHING = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def made(codec: SparseCodec, seed: int) -> dict[str, np.ndarray]:
    """A sound contribution."""
    count = codec.finish(codec.new_total(), 1.0).numel()
    change = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return codec.encode(change, codec.new_memory())


def plain(error: ArtifactRejected) -> str:
    """The reason, told in a line that does no harm."""
    assert error.told.isprintable()
    assert len(error.told) < 400
    return error.reason


def judged(data: bytes, codec: SparseCodec) -> str:
    """Why it is refused; empty where it is taken, and stands for what was said of it."""
    try:
        found = unpack(data, codec.shapes)
        norm = codec.check(found.tensors)
    except ArtifactRejected as error:
        return plain(error)
    total = codec.new_total()
    codec.fold(total, found.tensors)
    assert bool(torch.isfinite(total).all())
    assert float(total.double().norm()) == pytest.approx(norm, rel=1e-3, abs=1e-44)
    return ""


@settings(max_examples=300, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 9),
    changes=st.lists(st.tuples(st.sampled_from(["places", "scales", "values"]), st.integers(0, 1 << 30)), max_size=4),
    scale=st.sampled_from(ODD_SCALES),
    byte=st.integers(0, 255),
)
def test_tensors_of_any_content_are_refused_or_are_what_is_said_of_them(
    codec: SparseCodec, seed: int, changes: list[tuple[str, int]], scale: float, byte: int
) -> None:
    tensors = made(codec, seed)
    for name, place in changes:
        flat = tensors[name].reshape(-1)
        flat[place % flat.size] = scale if name == "scales" else np.uint8(byte).view(flat.dtype)
    reason = judged(pack({}, tensors)[1], codec)
    assert reason in ("", "index", "not finite", "malformed", "norm")
    assert changes or not reason


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(["places", "scales", "values", "more", "__metadata__"]),
    field=st.sampled_from(["dtype", "shape", "data_offsets", "penstock", ""]),
    told=ANYTHING,
)
def test_a_header_of_any_content_is_refused_or_changes_nothing(name: str, field: str, told: Any) -> None:
    codec = CODECS[2]
    data = pack({}, made(codec, 0))[1]
    length = 8 + int.from_bytes(data[:8], "little")
    described = json.loads(data[8:length])
    described[name] = {**described.get(name, {}), field: told} if field else told
    header = json.dumps(described).encode()
    reason = judged(len(header).to_bytes(8, "little") + header + data[length:], codec)
    assert reason in ("", "shape", "malformed")

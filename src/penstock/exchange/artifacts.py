"""Artifacts: tensors that cross a trust boundary, as safetensors with a header that their digest seals.

    8 bytes: length of the JSON ── JSON: tensors by name, type, shape, place; metadata.penstock: the header ── tensors

The header is JSON too: what the artifact is (kind, run, window, worker, ...) and `digest`, the BLAKE3 over the header
without it and over all tensor bytes. Reading never executes anything, allocates nothing that was not measured before,
and gives views of the bytes that came. Any reader of safetensors reads these files; this one also distrusts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from blake3 import blake3

from penstock.errors import ArtifactRejected

HEADER_BYTES = 16 << 10
"""More than this is no header of a contribution; safetensors' own JSON included."""
LONG_HEADER_BYTES = 8 << 20
"""Where every weight is named."""
_PREFIX = 8
_META = "__metadata__"
_FIELD = "penstock"
_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}

Tensors = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""What is expected: type (``F32``, ``I8``, ``U8``) and shape of every tensor, by name."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact that was checked."""

    header: dict[str, Any]
    tensors: Tensors
    digest: str


def pieces(header: dict[str, Any], tensors: Tensors) -> tuple[str, Iterator[bytes | memoryview]]:
    """An artifact's digest, and its bytes piece by piece, so that a large one is never held twice."""
    arrays = {name: np.asarray(array, order="C") for name, array in sorted(tensors.items())}
    digest = _digest(header, map(raw, arrays.values()))
    described: dict[str, Any] = {_META: {_FIELD: orjson.dumps({**header, "digest": digest}).decode()}}
    at = 0
    for name, array in arrays.items():
        kind = _NAMES[array.dtype]
        described[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    told = orjson.dumps(described)
    told += b" " * (-len(told) % 8)

    def each() -> Iterator[bytes | memoryview]:
        yield len(told).to_bytes(_PREFIX, "little") + told
        for array in arrays.values():
            yield raw(array)

    return digest, each()


def pack(header: dict[str, Any], tensors: Tensors) -> tuple[str, bytes]:
    """An artifact's digest, and its bytes as a whole."""
    digest, parts = pieces(header, tensors)
    return digest, b"".join(parts)


def largest(shapes: Shapes, header_bytes: int = HEADER_BYTES) -> int:
    """How many bytes an artifact of these tensors may have: more is not even read."""
    return header_bytes + sum(_TYPES[kind].itemsize * math.prod(shape) for kind, shape in shapes.values())


def unpack(data: bytes | memoryview, shapes: Shapes, header_bytes: int = HEADER_BYTES) -> Artifact:
    """Check an artifact and give views of its tensors; `ArtifactRejected` says what is wrong with it.

    Args:
        data: All of it.
        shapes: What it has to hold, no more and no less.
        header_bytes: The longest header that is read: JSON takes many times its length once it is read.
    """
    view = memoryview(data)
    header, described, begin = _headers(view, header_bytes)
    if described.keys() != shapes.keys():
        raise ArtifactRejected("shape", f"tensors {_some(described)}: expected {_some(shapes)}")
    tensors: Tensors = {}
    at = 0
    for name, (kind, shape) in sorted(shapes.items()):
        told = described[name]
        got = (told.get("dtype"), told.get("shape")) if isinstance(told, dict) else (None, None)
        if got != (kind, list(shape)):
            raise ArtifactRejected("shape", f"{name} is {_quoted(got)}: expected {kind} {list(shape)}")
        size = _TYPES[kind].itemsize * math.prod(shape)
        if told.get("data_offsets") != [at, at + size]:
            raise ArtifactRejected("malformed", f"{name} lies elsewhere than behind the tensor before it")
        tensors[name] = np.frombuffer(view[begin + at : begin + at + size], _TYPES[kind]).reshape(shape)
        at += size
    digest = header.pop("digest", None)
    try:
        found = _digest(header, [view[begin:]])  # what the tensors are views of, all of it
    except TypeError:  # nested deeper than can be written again
        raise ArtifactRejected("malformed", "its header cannot be written as it was read") from None
    if digest != found:
        raise ArtifactRejected("malformed", "its digest is not that of its content")
    return Artifact(header, tensors, found)


def _headers(view: memoryview, header_bytes: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The header, what is said of tensors, and where they begin."""
    length = int.from_bytes(view[:_PREFIX], "little")
    begin = _PREFIX + length
    if len(view) < _PREFIX or length > header_bytes or begin > len(view):
        told = f"its header has {length:,} bytes, expected at most {header_bytes:,}, and no more than the file"
        raise ArtifactRejected("malformed", f"this is no safetensors file: {told}")
    try:
        described = orjson.loads(view[_PREFIX:begin])
        header = orjson.loads(described.pop(_META)[_FIELD])
        if not isinstance(header, dict):
            raise TypeError
    except (orjson.JSONDecodeError, RecursionError, AttributeError, KeyError, TypeError):
        raise ArtifactRejected("malformed", "this is no safetensors file with a penstock header") from None
    try:
        size = max((told["data_offsets"][1] for told in described.values()), default=0)
    except (LookupError, TypeError, RecursionError):
        size = -1
    if size != len(view) - begin:
        told = f"{len(view) - begin} bytes of tensors: expected {_quoted(size)} by its header"
        raise ArtifactRejected("malformed", told)
    return header, described, begin


def _digest(header: dict[str, Any], content: Iterable[memoryview]) -> str:
    told = blake3(orjson.dumps(header, option=orjson.OPT_SORT_KEYS))
    for each in content:
        told.update(each)
    return told.hexdigest()


def raw(array: np.ndarray) -> memoryview:
    """An array's bytes where they are."""
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _quoted(value: object) -> str:
    """What a stranger wrote, short, and without what a terminal would take for a command."""
    try:
        return ascii(value)[:60]
    except RecursionError:  # JSON may be nested more deeply than can be written again
        return "nested too deeply to be told"


def _some(names: Mapping[str, Any]) -> str:
    told = [_quoted(name) for name in sorted(names)[:5]]
    return ", ".join(told) + (" and more" if len(names) > 5 else "") or "none"

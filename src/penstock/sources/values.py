"""Values JSON has no word for, in JSON; so that any column survives in a block.

bytes         {"$base64": "..."}          decimal    {"$decimal": "1.10"}
nan, inf      {"$float": "nan"}           duration   {"$seconds": 1.5}
date, time, datetime, UUID                ISO 8601 and canonical strings, as orjson writes them
nanoseconds                               the same with nine digits, where the last three are not 000
map                                       a list of [key, value]
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from typing import Any

import orjson

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def json_line(row: dict[str, Any], *, finite: bool = True) -> bytes:
    """A row as a block stores it: one JSON object and a newline.

    Args:
        row: Any values that columns hold.
        finite: False where a float may be NaN or infinite, which JSON cannot say and orjson would turn into null.
    """
    return orjson.dumps(row if finite else _spelled(row), default=_encode, option=_OPTIONS)


def why_not_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    """Why a line is no JSON, in words that help."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"not UTF-8: byte 0x{line[wrong.start]:02x} at offset {wrong.start}: name its encoding with --encoding"
    word = next((word for word in (b"NaN", b"Infinity") if word in line), None)
    if word is not None and "unexpected character" in str(error):
        return f"not JSON: {word.decode()} is no number in JSON: {error}"
    return f"not JSON: {error}"


def json_kind(value: object) -> str:
    """What JSON calls a value that was parsed."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _encode(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, datetime.timedelta):
        return {"$seconds": value.total_seconds()}
    raise TypeError(f"no way to write a {type(value).__name__} as JSON")


def _spelled(value: Any) -> Any:
    """The same value with every NaN and infinity as an object that says so."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(inner) for inner in value]
    return value

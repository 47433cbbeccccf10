"""Values of Arrow columns in Python, nanoseconds among them: Python's own dates and times end at microseconds."""

from __future__ import annotations

import datetime
from typing import Any


def column_values(column: Any) -> list[Any]:
    """A column's values; the same whether pandas is installed or not."""
    if "[ns" in str(column.type):
        return [_maybe(scalar) for scalar in column]
    return column.to_pylist()


def _maybe(scalar: Any) -> Any:
    return _exact(scalar) if scalar.is_valid else None


def _exact(scalar: Any) -> Any:
    """One value, whatever is nested in it; what Python's types cannot hold is spelled out as `values` says."""
    from pyarrow import types

    kind = scalar.type
    if types.is_map(kind):
        return [[_maybe(entry[0]), _maybe(entry[1])] for entry in scalar.values]
    if types.is_struct(kind):
        return {field.name: _maybe(scalar[place]) for place, field in enumerate(kind)}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_maybe(inner) for inner in scalar.values]
    if types.is_dictionary(kind):
        return _exact(scalar.value)
    is_nanoseconds = types.is_temporal(kind) and "[ns" in str(kind)
    return _nanoseconds(scalar.value, kind) if is_nanoseconds else scalar.as_py()


def _nanoseconds(value: int, kind: Any) -> Any:
    import pyarrow as pa
    from pyarrow import types

    microseconds, nanoseconds = divmod(value, 1000)
    if types.is_duration(kind):
        return {"$seconds": value / 10**9} if nanoseconds else datetime.timedelta(microseconds=microseconds)
    coarser = pa.time64("us") if types.is_time(kind) else pa.timestamp("us", tz=kind.tz)
    moment = pa.scalar(microseconds, coarser).as_py()
    if not nanoseconds:
        return moment
    text = moment.isoformat(timespec="microseconds")
    whole = text.index(".") + 7
    return f"{text[:whole]}{nanoseconds:03d}{text[whole:]}"

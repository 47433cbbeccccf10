"""Numbers as users give them: of numpy, of torch or of Python, they become Python's; what is no whole one is refused.

A number is part of an order's key and of a stored state, so 3 has to be 3 whatever counted up to it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.errors import ConfigError


def whole_number(name: str, value: Any) -> int:
    """A whole number, of whatever type it is."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}: expected a whole number") from None


def sample_numbers(given: Iterable[Any]) -> np.ndarray:
    """Sample ids, sorted and each once. A mask is refused, for it would be taken for the samples 0 and 1."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigError(f"sample_ids={given!r} is no collection: expected whole numbers, as in [12, 13]")
    listed = given if isinstance(given, np.ndarray) else list(given)
    array = np.asarray(listed)
    if not array.size:
        return np.empty(0, dtype=np.int64)
    if array.dtype == bool:
        raise ConfigError("sample_ids are True and False, which is a mask: expected numbers, as np.flatnonzero(mask)")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shown = ", ".join(map(repr, array.ravel()[:3].tolist()))
        raise ConfigError(f"sample_ids {shown}, ... are not all whole numbers in a row: expected such, as [12, 13]")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ConfigError(f"sample {array.max()} is beyond all data sets: expected ids of samples")
    return np.unique(array.astype(np.int64))

"""Arrays as tensors, of the types that models take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_tensor(value: Any, *, pin_memory: bool = False) -> Any:
    """An array as a tensor, integers as int64; anything else as it is. Shares the array's memory where it can."""
    if isinstance(value, torch.Tensor):
        wanted = value.to(torch.int64) if _is_integer(value.dtype) else value
        return wanted.pin_memory() if pin_memory and not wanted.is_pinned() else wanted
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iufb":
        return value
    dtype = torch.int64 if value.dtype.kind in "iu" else torch.from_numpy(np.empty(0, value.dtype)).dtype
    if pin_memory:
        pinned = torch.empty(value.shape, dtype=dtype, pin_memory=True)
        np.copyto(pinned.numpy(), value, casting="unsafe")  # converts and copies in one pass
        return pinned
    if dtype == torch.int64 and value.dtype != np.int64:
        return torch.from_numpy(value.astype(np.int64))
    # A tensor can be written to, so what is not meant to be written is copied.
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool

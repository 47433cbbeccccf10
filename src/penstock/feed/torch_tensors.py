"""Arrays as tensors, of the types that models take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def as_tensor(value: Any, *, pin_memory: bool = False) -> Any:
    """An array as a tensor; anything else as it is. Shares the array's memory where it can.

    Token ids come as small as they can be, without a sign; models index with int64, so that is what they become.
    Everything else keeps its type: `cu_seqlens` is int32 because the kernels that take it want it so.
    """
    if isinstance(value, torch.Tensor):
        wanted = value.to(torch.int64) if value.dtype in _UNSIGNED else value
        return wanted.pin_memory() if pin_memory and not wanted.is_pinned() else wanted
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iufb":
        return value
    is_unsigned = value.dtype.kind == "u"
    if pin_memory:
        dtype = torch.int64 if is_unsigned else torch.from_numpy(np.empty(0, value.dtype)).dtype
        pinned = torch.empty(value.shape, dtype=dtype, pin_memory=True)
        np.copyto(pinned.numpy(), value, casting="unsafe")  # converts and copies in one pass
        return pinned
    if is_unsigned:
        return torch.from_numpy(value.astype(np.int64))
    # A tensor can be written to, so what is not meant to be written is copied.
    return torch.from_numpy(value if value.flags.writeable else value.copy())

"""fp32 weights as two halves of 16 bits: the bf16 that is computed with, and what is missing to the whole.

    fp32:      | sign, exponent, 7 bits | 16 bits |        bf16 = the upper half, one more where the lower begins with 1
    halves:    | bf16, rounded          | lower   |        so the lower half says whether one was added

Exact, in the room of fp32 alone: no copy for computing beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def split(weights: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Write fp32 as halves.

    Args:
        weights: fp32.
        upper: bf16, the nearest to each; of two as near, the one farther from 0.
        lower: int16.
    """
    bits = weights.view(torch.int32)
    lower.copy_(bits)  # the lower 16 bits
    upper.view(torch.int16).copy_((bits + 0x8000) >> 16)


@torch.no_grad()
def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 that `split` was given."""
    bits = upper.view(torch.int16).to(torch.int32)
    bits += lower >> 15  # -1 where one was added
    bits <<= 16
    bits |= lower.to(torch.int32) & 0xFFFF
    return bits.view(torch.float32)

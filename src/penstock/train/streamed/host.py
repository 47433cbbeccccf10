"""What the host holds of every unit: fp32 weights and moments, a 16-bit image of the weights, gradients that arrive.

    memory the ranks of a machine share          memory of each rank, which the others of its machine read
    | image | weights | mean | square | ...      | gradients by unit ...

The image is what a device loads. Without a 16-bit type there is none apart: weights are their own image. Memory has no
name anywhere, so nothing is left behind, however the processes end: alone it is anonymous, shared it is a memory file
that the others open through the process that made it. Both are registered with CUDA, so that copies run at full speed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import TrainError
from penstock.train.streamed.layout import Unit

_PAGE = 2 << 20
"""What is laid out begins at whole large pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUnit:
    """One unit on the host."""

    image: Tensor
    weights: Tensor
    mean: Tensor
    square: Tensor
    """Adam's moments."""


class HostMemory:
    """A run of bytes that is mapped once and cut into arrays."""

    def __init__(self, num_bytes: int, *, file: int | None = None) -> None:
        """Map memory, all zeros.

        Args:
            num_bytes: Of it; taken up only as it is written to.
            file: A memory file that others have too; None for memory of this process alone.
        """
        try:
            if file is None:
                self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._map.madvise(mmap.MADV_HUGEPAGE)
            else:
                self._map = mmap.mmap(file, num_bytes)
        except OSError as error:
            raise _too_much(num_bytes, error) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered: list[int] = []
        self._used = 0

    def take(self, dtype: torch.dtype, count: int) -> Tensor:
        """The next array."""
        size = count * dtype.itemsize
        found = self._bytes[self._used : self._used + size].view(dtype)
        self._used += _whole_pages(size)
        return found

    def register(self, array: Tensor) -> None:
        """Have CUDA copy to and from an array at full speed."""
        code = int(_cudart().cudaHostRegister(array.data_ptr(), _whole_pages(array.nbytes), 0))
        if code:
            raise TrainError(
                f"{array.nbytes / 2**30:.1f} GiB of host memory cannot be locked for the GPU (CUDA error {code}): free "
                "host memory, or raise `ulimit -l`"
            )
        self._registered.append(array.data_ptr())

    def close(self) -> None:
        """Give up what is registered; memory goes with its last array."""
        for pointer in self._registered:
            _cudart().cudaHostUnregister(pointer)
        self._registered.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _too_much(num_bytes: int, error: OSError) -> TrainError:
    return TrainError(
        f"{num_bytes / 2**30:.1f} GiB of host memory cannot be had ({error.strerror}): free some, or train a smaller "
        "model"
    )


class HostState:
    """All units on the host."""

    def __init__(self, units: list[Unit], *, image_dtype: torch.dtype, file: int | None = None, pinned: bool) -> None:
        """Map memory for all units.

        Args:
            units: In their order.
            image_dtype: Of what devices load; fp32 for no image apart from the weights.
            file: A memory file shared with other ranks; None where there are none.
            pinned: Whether images are registered with CUDA.
        """
        memory = HostMemory(self.num_bytes(units, image_dtype), file=file)
        self.memory = memory
        self.units: list[HostUnit] = []
        for unit in units:
            image = memory.take(image_dtype, unit.size) if image_dtype != torch.float32 else None
            weights, mean, square = (memory.take(torch.float32, unit.size) for _ in range(3))
            made = HostUnit(image=weights if image is None else image, weights=weights, mean=mean, square=square)
            if pinned:
                memory.register(made.image)
            self.units.append(made)

    @staticmethod
    def num_bytes(units: list[Unit], image_dtype: torch.dtype) -> int:
        own_image = image_dtype != torch.float32
        return sum(
            own_image * _whole_pages(unit.size * image_dtype.itemsize) + 3 * _whole_pages(4 * unit.size)
            for unit in units
        )

    @torch.no_grad()
    def make_images(self) -> None:
        """After weights were written as a whole."""
        for unit in self.units:
            if unit.image is not unit.weights:
                unit.image.copy_(unit.weights)


class HostGradients:
    """The gradients of one rank, as they come from its device."""

    def __init__(
        self, units: list[Unit], dtype_of: Callable[[Unit], torch.dtype], *, file: int | None = None, pinned: bool
    ) -> None:
        self.memory = HostMemory(self.num_bytes(units, dtype_of), file=file)
        self.units = [self.memory.take(dtype_of(unit), unit.size) for unit in units]
        if pinned:
            for array in self.units:
                self.memory.register(array)

    @staticmethod
    def num_bytes(units: list[Unit], dtype_of: Callable[[Unit], torch.dtype]) -> int:
        return sum(_whole_pages(unit.size * dtype_of(unit).itemsize) for unit in units)


def memory_file(num_bytes: int) -> int:
    """A file in memory, without a name, of so many zeros; it goes with the last process that has it open."""
    file = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
    except OSError as error:
        os.close(file)
        raise _too_much(num_bytes, error) from error
    return file

"""A batch as a model takes it: tensors on the device, beside the batch they were made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.feed import Batch
from penstock.feed.torch_tensors import as_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """Token arrays of a `Batch` as tensors; everything else is asked of `source`."""

    source: Batch
    num_tokens: int
    """Tokens learned from; counted once, where there is time for it."""
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor
    copied: torch.cuda.Event | None = None
    """Happens when the device has the tensors; None where nothing had to be copied on a stream of its own."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.input_ids, self.labels, self.position_ids, self.document_ids

    def wait(self) -> None:
        """Have the current stream wait for the copy, and the memory for the current stream."""
        if self.copied is not None:
            current = torch.cuda.current_stream(self.input_ids.device)
            current.wait_event(self.copied)
            for tensor in self.tensors:
                tensor.record_stream(current)


def to_device(batch: Batch, device: torch.device, stream: torch.cuda.Stream | None = None) -> DeviceBatch:
    """Make tensors of a batch; with a stream, the copy goes on while others compute: `DeviceBatch.wait` is for that."""
    arrays = {name: getattr(batch, name) for name in ("input_ids", "labels", "position_ids", "document_ids")}
    if stream is None:
        moved = {name: as_tensor(array).to(device) for name, array in arrays.items()}
        return DeviceBatch(source=batch, num_tokens=batch.num_tokens, **moved)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        moved = {
            name: as_tensor(array, pin_memory=True).to(device, non_blocking=True) for name, array in arrays.items()
        }
        copied = torch.cuda.Event()
        copied.record(stream)
    return DeviceBatch(source=batch, num_tokens=batch.num_tokens, copied=copied, **moved)

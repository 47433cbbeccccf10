"""How much memory a graph holds on to: bytes of saved tensors that are alive, and the most there ever were."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes(AbstractContextManager["SavedBytes"]):
    """While inside, counts the memory that autograd keeps for going back, on any device.

        with SavedBytes() as saved:
            loss = model(...); loss.backward()
        saved.peak

    Memory is counted once, however many saved tensors share it, from when the first is saved until the graph lets the
    last go. Hooks that are set further inside (`save_on_cpu`, checkpointing) have their tensors to themselves: those
    are not counted. Weights that are saved are counted unless named.
    """

    def __init__(self, *ignored: Tensor) -> None:
        """Count everything but the memory of some tensors, such as the weights."""
        self.alive = 0
        """Bytes kept now."""
        self.peak = 0
        """The most bytes that were kept at a time."""
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._users: Counter[int] = Counter()
        self._hooks = saved_tensors_hooks(self._pack, _Kept.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def restart(self) -> None:
        """Forget the peak: from here on it is of what is alive now and what follows."""
        self.peak = self.alive

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._ignored:
            self._users[place] += 1
            if self._users[place] == 1:
                self.alive += size
                self.peak = max(self.peak, self.alive)
            weakref.finalize(kept, self._release, place, size)
        return kept

    def _release(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.alive -= size


class _Kept:
    """A saved tensor, as the graph holds it; when the graph lets go of it, that is noticed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def tensor(self) -> Tensor:
        return self._tensor

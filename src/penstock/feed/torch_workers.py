"""A loader's batches made by worker processes of a torch DataLoader, where one process is too slow to make them.

    main process: (epoch, k), (epoch, k + 1), ...  ──► workers: loader.batch(epoch, k) ──► tensors, in order

Batch k is a pure function, so any number of workers gives the same batches, and the state is the main process's alone.
Usually there is no need for it: a loader makes batches ahead in a thread, from a token cache that is read at memory
speed. The cost: each worker keeps the window it is at in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from penstock.errors import ConfigError, PenstockError
from penstock.feed.loader import DistributedLoader
from penstock.feed.state import LoaderState
from penstock.feed.torch_tensors import as_tensor

Batch = dict[str, Any]
Numbered = tuple[int, int]


class _Batches(Dataset[Batch]):
    """Batches by epoch and number: a copy of a loader in a worker does not learn where the loader itself stands."""

    def __init__(self, loader: DistributedLoader) -> None:
        self._loader = loader

    def __getitem__(self, numbered: Numbered) -> Batch:
        return {name: as_tensor(value) for name, value in self._loader.batch(*numbered).items()}


class _Steps(Sampler[Numbered]):
    """The numbers of the batches that are left of the epoch in which a loader stands."""

    def __init__(self, loader: DistributedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Numbered]:
        epoch = self._loader.epoch
        return ((epoch, step) for step in range(self._loader.step, self._loader.batches_per_epoch))


class WorkerBatches:
    """The batches of a `DistributedLoader` as tensors, made by processes. Stands for the loader, in `TorchBatches` too.

    Not for a mix of data sets. Packed sequences need the whole token cache (`penstock tokenize`): without it batches
    have no numbers. A worker that dies, or gives no batch within `timeout_s`, is an error, as the DataLoader tells it.
    """

    def __init__(
        self,
        loader: DistributedLoader,
        num_workers: int,
        *,
        prefetch_factor: int = 2,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        timeout_s: float = 600.0,
    ) -> None:
        """Remember what to do; processes start with an iteration and end with it.

        Args:
            loader: Whose batches.
            num_workers: How many processes; 0 makes batches in this one.
            prefetch_factor: How many batches a worker makes ahead.
            start_method: How processes start. A forked one is there sooner, and must not find threads at work.
            timeout_s: How long to wait for a batch.
        """
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} cannot be: expected 0 or more")
        self.loader = loader
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.start_method = start_method
        self.timeout_s = timeout_s

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where it stands to the end of the epoch."""
        loader, epoch = self.loader, self.loader.epoch
        while loader.epoch == epoch:
            for batch in self._batches():
                step = loader.step + 1
                loader.go_to(step)
                before = loader.state_changes
                yield batch
                if loader.state_changes != before:
                    break  # what the workers make is of the plan before
            else:
                for _ in loader:  # nothing is left: it goes to where it stands behind an epoch
                    raise PenstockError(f"workers have made all {loader.step} batches, and the loader has more of them")

    def _batches(self) -> DataLoader[Batch]:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {
                "num_workers": self.num_workers,
                "prefetch_factor": self.prefetch_factor,
                "multiprocessing_context": self.start_method,
                "timeout": self.timeout_s,
            }
        return DataLoader(
            _Batches(self.loader), batch_size=None, sampler=_Steps(self.loader), collate_fn=_as_it_is, **workers
        )

    # -- where it stands: the loader's word ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    @property
    def step(self) -> int:
        return self.loader.step

    def reshuffle(self, epoch: int) -> None:
        self.loader.reshuffle(epoch)

    def exclude(
        self, sample_ids: Collection[int] | np.ndarray, *, source: str | None = None, at_once: bool = False
    ) -> None:
        self.loader.exclude(sample_ids, source=source, at_once=at_once)

    @property
    def position(self) -> LoaderState:
        return self.loader.position

    def state_at(self, position: LoaderState) -> dict[str, Any]:
        return self.loader.state_at(position)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        self.loader.load_state_dict(state, allow=allow)

    def timings(self) -> dict[str, float]:
        """The loader's in this process; workers count for themselves."""
        return self.loader.timings()


def _as_it_is(batch: Any) -> Any:
    return batch

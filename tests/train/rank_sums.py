"""One step as one rank makes it, and what came of it: run in processes of their own by `test_rank_sums.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from penstock.errors import TrainError
from penstock.feed import Batch
from penstock.storage import LocalStorage
from penstock.train import summing
from penstock.train.courses import batch_of
from penstock.train.parts import RunParts
from penstock.train.ranks import Ranks, joined_ranks


def first_step(run_dir: Path, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The loss and the gradients of the first global batch."""
    parts = RunParts(LocalStorage(run_dir), "")
    trainer = parts.trainer()
    share = cast(Batch, batch_of(next(iter(parts.loader(ranks.rank, ranks.world)))))
    result = trainer.step(share, 1, ranks if ranks.world > 1 else None)
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {
        "loss": torch.tensor(result.loss, dtype=torch.float64),
        "tokens": torch.tensor(result.num_tokens),
    } | gradients


class Afterwards(Ranks):
    """Ranks that sum one bucket after the other once all gradients are there."""

    def expect_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        pass

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for bucket in summing.buckets(parameters):
            has = torch.tensor([float(parameter.grad is not None) for parameter in bucket])
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), has])
            dist.all_reduce(flat)
            *parts, has = flat.split([*(parameter.numel() for parameter in bucket), len(bucket)])
            for parameter, part, found in zip(bucket, parts, has.tolist(), strict=True):
                parameter.grad = part.reshape(parameter.shape) if found else None


class Noting(Ranks):
    """Ranks that count how many sums have begun by the end of the backward pass."""

    begun = begun_meanwhile = 0

    def _begin_sum(self, flat: torch.Tensor) -> Callable[[], None]:
        self.begun += 1
        return super()._begin_sum(flat)

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self.begun_meanwhile = self.begun
        super().sum_gradients(parameters)


def check_overlap(run_dir: Path, ranks: Ranks) -> None:
    """Sums that begin during the backward pass have the bits of sums behind it, in many buckets."""
    summing.BUCKET_ELEMENTS = 5_000
    noting = Noting(ranks.rank, ranks.world)
    meanwhile = first_step(run_dir, noting)
    parameters = RunParts(LocalStorage(run_dir), "").trainer().model.parameters()
    assert noting.begun == noting.begun_meanwhile == len(list(summing.buckets(parameters))) > 5
    afterwards = first_step(run_dir, Afterwards(ranks.rank, ranks.world))
    assert meanwhile.keys() == afterwards.keys()
    assert all(meanwhile[name].equal(afterwards[name]) for name in meanwhile)


def check_uneven_backward(ranks: Ranks) -> None:
    """Ranks that use other parameters, or learn nothing at all, sum the same buckets in the same order."""
    summing.BUCKET_ELEMENTS = 2
    parts = [torch.nn.Parameter(torch.full((2,), 1.0)) for _ in range(5)]
    if ranks.rank:  # rank 0 has nothing to learn from
        ranks.expect_gradients(parts)
        used = [part for place, part in enumerate(parts) if place not in (ranks.rank, 4)]
        torch.stack([part.sum() * 2.0**ranks.rank for part in used]).sum().backward()
    ranks.sum_gradients(parts)
    others = range(1, ranks.world)
    for place, part in enumerate(parts):
        expected = sum(2.0**rank for rank in others if place not in (rank, 4))
        assert (part.grad is None) == (not expected), place
        assert part.grad is None or part.grad.tolist() == [expected] * 2
    twice = torch.nn.Parameter(torch.ones(2))
    if ranks.world > 1:
        ranks.expect_gradients([twice])
        twice.sum().backward()
        with pytest.raises(TrainError, match="a gradient came when its sum over ranks had begun"):
            twice.sum().backward()
        ranks.sum_gradients([twice])


def main(run_dir: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with joined_ranks(torch.device("cpu"), timeout_s=60) as ranks:
        save_file(first_step(run_dir, ranks), out / f"{ranks.world}-{ranks.rank}.safetensors")
        if ranks.world > 1:
            check_overlap(run_dir, ranks)
        check_uneven_backward(ranks)
        sparse = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
        sparse[0].grad = torch.full((3,), 2.0**ranks.rank)
        if ranks.rank == ranks.world - 1:
            sparse[1].grad = torch.ones(2)
        ranks.sum_gradients(sparse)
        assert sparse[0].grad.tolist() == [2.0**ranks.world - 1] * 3
        assert sparse[1].grad is not None
        assert sparse[1].grad.tolist() == [1.0, 1.0], "a rank without a gradient counts as 0"
        assert sparse[2].grad is None, "nobody has one"
        ranks.require_equal([torch.ones(3)])
        if ranks.world > 1:
            with pytest.raises(TrainError, match=f"{ranks.world - 1} of {ranks.world} ranks have other weights"):
                ranks.require_equal([torch.full((3,), float(ranks.rank))])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)

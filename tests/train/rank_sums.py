"""One step as one rank makes it, and what came of it: run in processes of their own by `test_rank_sums.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import TrainError
from penstock.feed import Batch
from penstock.storage import LocalStorage
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


def main(run_dir: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with joined_ranks(torch.device("cpu"), timeout_s=60) as ranks:
        save_file(first_step(run_dir, ranks), out / f"{ranks.world}-{ranks.rank}.safetensors")
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

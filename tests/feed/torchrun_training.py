"""A training under torchrun, as a user would write it: every rank its share, the state with the checkpoint.

torchrun ... torchrun_training.py STORE FOLDER packed|texts [STEP AT WHICH RANK 1 DIES]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch

from feed.stores import make_loader
from penstock.feed import source_feed, token_cache
from penstock.feed.torch_adapter import TorchBatches, rank_and_world_size

COMMIT_EVERY = 4


def main(store: Path, folder: Path, kind: str, dies_at: int | None) -> None:
    token_cache.CHUNK_BYTES, source_feed.WINDOW_CHUNKS = 400, 3
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = rank_and_world_size()
    assert (str(rank), str(world_size)) == (os.environ["RANK"], os.environ["WORLD_SIZE"])
    batches = TorchBatches(make_loader(store, packed=kind == "packed", rank=rank, world_size=world_size), ahead=3)
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        batches.load_state_dict(json.loads(checkpoint.read_text())["state"])
    trained: list[tuple[int, list[int]]] = []
    for batch in batches:
        seen = torch.tensor([len(batch["sample_ids"])])
        torch.distributed.all_reduce(seen)  # a collective a step: hangs where ranks have uneven steps
        trained.append((batches.step, batch["sample_ids"].tolist()))
        if rank == 1 and batches.step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if batches.step % COMMIT_EVERY == 0:
            commit(checkpoint, batches.state_dict(), trained)
    commit(checkpoint, batches.state_dict(), trained)
    torch.distributed.destroy_process_group()


def commit(checkpoint: Path, state: dict[str, object], trained: list[tuple[int, list[int]]]) -> None:
    """What all ranks have learned since the last one, bound to the state; a crash before the rename loses all of it."""
    everybody: list[object] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, (state, trained))
    trained.clear()
    if torch.distributed.get_rank() == 0:
        states, learned = zip(*everybody, strict=True)  # pyright: ignore[reportArgumentType]
        assert all(other == states[0] for other in states), "one state for all ranks"
        before = json.loads(checkpoint.read_text())["learned"] if checkpoint.exists() else []
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(json.dumps({"state": states[0], "learned": [*before, *learned]}))
        temporary.rename(checkpoint)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else None)

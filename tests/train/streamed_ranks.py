"""What one rank of a streamed job does, in a process of its own: started by `test_streamed_ranks.py`."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ConfigError, RankLost, TrainError
from penstock.feed import IGNORED_LABEL
from penstock.train.device_batch import DeviceBatch
from penstock.train.ranks import Ranks, joined_ranks
from penstock.train.streamed import StreamedTrainer, due
from penstock.train.streamed.decoder import Decoder
from penstock.train.trainer import Precision
from train.streamed_models import CPU, QWEN2, batch, model, rows_of, schedule

due.PART = 1_000  # so that units of small models are stepped in several parts, too
CONFIG: dict[str, Any] = {**QWEN2, "num_hidden_layers": 2}
STEPS = 20
SIZES = (5, 7, 3, 1)
"""Sequences of batches, in turn: no number of ranks shares all of them evenly, and some ranks have none."""

SEEDS = (3, 4, 5)
"""Of batches whose first step is looked at."""

Results = dict[str, Tensor]


def share(whole: DeviceBatch, ranks: Ranks) -> DeviceBatch:
    return rows_of(whole, slice(ranks.rank, None, ranks.world))


def even_batch(seed: int = 3) -> DeviceBatch:
    """Four sequences with as many tokens each, so that means of means are right too."""
    return batch([[5, 7]] * 4, seed=seed)


def batch_of_step(step: int) -> DeviceBatch:
    rows = SIZES[step % len(SIZES)]
    return batch([[12], [5, 7], [3, 6], [4], [12], [2, 2, 8], [12]][:rows], seed=step)


@contextmanager
def trainer_of(
    ranks: Ranks, *, rate: float = 1e-3, config: dict[str, Any] = CONFIG, **more: Any
) -> Iterator[StreamedTrainer]:
    trainer = StreamedTrainer(model(config), schedule=schedule(rate), ranks=ranks, **more)
    try:
        yield trainer
    finally:
        trainer.close()


def summed_gradients(trainer: StreamedTrainer, ranks: Ranks) -> Results:
    """The gradients of all ranks, by parameter: every rank has its shares of them."""
    found: Results = {}
    for unit in trainer.units:
        if ranks.world == 1:
            whole = trainer.streaming.gradients[0].units[unit.index].float()
        else:
            mine = trainer.streaming.optimizer._sums[unit.index].clone()
            shares = [torch.empty_like(mine) for _ in range(ranks.local_world)]
            dist.all_gather(shares, mine)
            whole = torch.cat(shares)
        found |= {place.name: place.of(whole).clone() for place in unit.places}
    return found


def first_step(ranks: Ranks, precision: Precision, seed: int = 3) -> Results:
    with trainer_of(ranks, precision=precision) as trainer:
        result = trainer.step(share(even_batch(seed), ranks), 1, ranks)
        gradients = summed_gradients(trainer, ranks)
    return {f"{precision} {seed} loss": torch.tensor(result.loss, dtype=torch.float64)} | {
        f"{precision} {seed} {name}": tensor for name, tensor in gradients.items()
    }


def standard_ddp(ranks: Ranks, seed: int) -> Results:
    """The gradients of torch's own data parallelism with weights in bf16, as models are loaded in it."""
    learner = model(CONFIG)
    for parameter in learner.parameters():
        parameter.data = parameter.data.bfloat16()
    parallel = DistributedDataParallel(learner)
    fed = share(even_batch(seed), ranks)
    logits = parallel(fed.input_ids, fed.position_ids, fed.document_ids).flatten(0, 1).float()
    torch.nn.functional.cross_entropy(logits, fed.labels.flatten(), ignore_index=IGNORED_LABEL).backward()
    return {f"ddp {seed} {name}": p.grad.float() for name, p in learner.lm.named_parameters() if p.grad is not None}


def curve(ranks: Ranks) -> Results:
    """The losses of some steps; every share of this rank changes at every one, and so do this rank's own images."""
    losses: list[float] = []
    with trainer_of(ranks) as trainer:
        before = own_shares(trainer)
        for step in range(1, STEPS + 1):
            losses.append(trainer.step(share(batch_of_step(step), ranks), step, ranks).loss)
            after = own_shares(trainer)
            for old, new in zip(before, after, strict=True):
                assert not torch.equal(old, new), f"rank {ranks.rank} has weights that step {step} has not changed"
            before = after
        ranks.require_equal(trainer.tensors_alike())
        weights = {f"curve {name}": tensor.clone() for name, tensor in trainer.state().items() if "model." in name}
        ranks.total([0.0])
    return {"curve losses": torch.tensor(losses, dtype=torch.float64), **weights}


def own_shares(trainer: StreamedTrainer) -> list[Tensor]:
    sharing, weights = trainer.streaming.sharing, list(trainer.tensors_alike())
    shares = [unit.share(sharing.local_rank, sharing.local_world) for unit in trainer.units]
    return [flat[part].clone() for flat, part in zip(weights, shares, strict=True) if flat[part].any()]


def check_resume(ranks: Ranks) -> None:
    """A fresh trainer that is given a state goes on with the same bits, on all ranks."""
    with trainer_of(ranks, precision="bf16") as trainer:
        for step in (1, 2, 3):
            trainer.step(share(batch_of_step(step), ranks), step, ranks)
        kept = {name: tensor.clone() for name, tensor in trainer.state().items()}
        ranks.total([0.0])
        expected = [trainer.step(share(batch_of_step(step), ranks), step, ranks) for step in (4, 5)]
        after = {name: tensor.clone() for name, tensor in trainer.state().items()}
        ranks.total([0.0])
    with trainer_of(ranks, precision="bf16", rate=1e-3) as fresh:
        fresh.step(share(batch_of_step(9), ranks), 1, ranks)  # something else before
        fresh.load_state(kept)
        assert [fresh.step(share(batch_of_step(step), ranks), step, ranks) for step in (4, 5)] == expected
        assert all(tensor.equal(after[name]) for name, tensor in fresh.state().items())
        ranks.total([0.0])


def check_at_once(ranks: Ranks) -> None:
    """Without a norm to wait for, units are stepped as their gradients arrive; the weights are the same."""
    found: list[Results] = []
    for norm in (0.0, 1e9):
        with trainer_of(ranks, max_grad_norm=norm) as trainer:
            for step in range(1, 7):
                trainer.step(share(batch_of_step(step), ranks), step, ranks)
            found.append({name: tensor.clone() for name, tensor in trainer.state().items() if "model." in name})
            ranks.total([0.0])
    assert all(tensor.equal(found[1][name]) for name, tensor in found[0].items())


def check_parity_together(ranks: Ranks) -> None:
    """All ranks refuse what rank 0 has found wrong, and go on where nothing is."""
    with trainer_of(ranks) as trainer:
        trainer.check_parity()
        right = Decoder.layer
        with pytest.MonkeyPatch.context() as patch:
            if ranks.is_first:
                patch.setattr(Decoder, "layer", lambda *given: 1.5 * right(*given))
            with pytest.raises(TrainError if ranks.is_first else RankLost, match="on a small batch is"):
                trainer.check_parity()
        trainer.check_parity()
        trainer.step(share(batch_of_step(1), ranks), 1, ranks)


def as_two_machines(ranks: Ranks) -> Results:
    """The curve, with half of the ranks on each of two machines as far as they know."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return {f"two machines, {name}": tensor for name, tensor in curve(ranks).items()}
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def check_uneven_machines(ranks: Ranks) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "3" if ranks.rank < 3 else "1"
    try:
        with pytest.raises(ConfigError, match=r"4 ranks on machines with 1, 3 each.*as many ranks on every machine"):
            StreamedTrainer(model(CONFIG), schedule=schedule(), ranks=ranks)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def all_checks(ranks: Ranks) -> Results:
    found = curve(ranks)
    for seed in SEEDS:
        found |= first_step(ranks, "fp32", seed)
    if ranks.world > 1:
        check_at_once(ranks)
    if ranks.world == 3:
        check_resume(ranks)
        check_parity_together(ranks)
    if ranks.world == 4:
        for seed in SEEDS:
            found |= first_step(ranks, "bf16", seed) | standard_ddp(ranks, seed)
        found |= as_two_machines(ranks)
        check_uneven_machines(ranks)
    return found


def lead(jobs: list[list[dict[str, str]]], act: Callable[[Ranks, Path], None], out: Path) -> None:
    """Import what is needed once; then fork the ranks of one job after the other, and note how they end."""
    os.setpgrp()
    torch.set_num_threads(1)
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    importlib.import_module("torch._dynamo")
    for environments in jobs:
        ranks = [_forked(environment, act, out) for environment in environments]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        (out / f"codes-{len(codes)}").write_text(" ".join(map(str, codes)))


def _forked(environment: dict[str, str], act: Callable[[Ranks, Path], None], out: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ.update(environment)
        (out / f"process-{environment['RANK']}").write_text(str(os.getpid()))
        with joined_ranks(CPU, timeout_s=60) as ranks:
            act(ranks, out)
    except BaseException:  # noqa: BLE001 - told, and said by how it ends
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def note_all_checks(ranks: Ranks, out: Path) -> None:
    found = {name: tensor.contiguous() for name, tensor in all_checks(ranks).items()}
    save_file(found, out / f"{ranks.world}-{ranks.rank}.safetensors")


def learn_until_lost(ranks: Ranks, out: Path) -> None:
    """Learn on and on; what ends it is told with the time."""
    step = 0
    with trainer_of(ranks, max_grad_norm=0.0 if ranks.world == 2 else 1.0) as trainer:
        try:
            while True:
                step += 1
                trainer.step(share(batch_of_step(step), ranks), step, ranks)
                (out / f"steps-{ranks.rank}").write_text(str(step))
        except RankLost as error:
            (out / f"lost-{ranks.rank}").write_text(f"{time.time()} {error}")
    os._exit(3)

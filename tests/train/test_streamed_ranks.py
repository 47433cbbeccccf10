"""Streamed training on several ranks is that of one: the same loss, gradients and weights, on any number of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from equipment.forks import start_process
from equipment.ranks import PATIENCE_S, meeting_place
from penstock.train.ranks import Ranks
from train.streamed_ranks import SEEDS, all_checks, lead, learn_until_lost, note_all_checks

pytestmark = pytest.mark.usefixtures("one_thread")
Results = dict[str, Tensor]


@pytest.fixture(scope="module")
def alone(one_thread: None) -> Results:
    """What one process finds."""
    return all_checks(Ranks())


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """What 2, 3 and 4 ranks find, rank by rank."""
    out, worlds = tmp_path_factory.mktemp("ranks"), (2, 3, 4)
    with (
        ExitStack() as places,
        led([places.enter_context(meeting_place(world)) for world in worlds], note_all_checks, out) as leader,
    ):
        leader.join(PATIENCE_S)
        assert [codes(out, world) for world in worlds] == [[0] * world for world in worlds]
    return {world: [load_file(out / f"{world}-{rank}.safetensors") for rank in range(world)] for world in worlds}


@contextmanager
def led(jobs: list[list[dict[str, str]]], act: Callable[[Ranks, Path], None], out: Path) -> Iterator[BaseProcess]:
    """A process that runs jobs of ranks; it and what is left of them are killed in the end."""
    leader = start_process(lead, jobs, act, out)
    try:
        yield leader
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid or 0, signal.SIGKILL)
        leader.kill()
        leader.join()


def codes(out: Path, world: int) -> list[int]:
    """How ranks have ended."""
    return [int(code) for code in (out / f"codes-{world}").read_text().split()]


def distance(found: Results, kind: str, truth: Results, seed: int) -> float:
    """Of all gradients together, by the norm of the truth."""
    of_truth = f"fp32 {seed} "
    names = [name.removeprefix(of_truth) for name in truth if name.startswith(of_truth) and not name.endswith("loss")]
    apart = torch.stack([(found[f"{kind} {seed} {name}"] - truth[of_truth + name]).norm() for name in names]).norm()
    return float(apart / torch.stack([truth[of_truth + name].norm() for name in names]).norm())


def test_four_ranks_with_a_sequence_each_make_the_first_step_of_one_with_four(
    alone: Results, together: dict[int, list[Results]]
) -> None:
    for found in together[4]:
        for seed in SEEDS:
            loss = f"fp32 {seed} loss"
            assert float(found[loss]) == pytest.approx(float(alone[loss]), rel=1.5e-9)
            assert distance(found, "fp32", alone, seed) < 2.5e-5, "of the norm, too"
        for name in alone:
            if name.startswith("fp32 "):
                torch.testing.assert_close(found[name], alone[name], rtol=0, atol=2.5e-5)


def test_bf16_is_closer_to_fp32_than_standard_data_parallelism_is(
    alone: Results, together: dict[int, list[Results]]
) -> None:
    ranks = together[4][0]
    for seed in SEEDS:
        assert distance(ranks, "bf16", alone, seed) < distance(ranks, "ddp", alone, seed) < 0.05


def test_any_number_of_ranks_has_the_same_losses(alone: Results, together: dict[int, list[Results]]) -> None:
    for ranks in together.values():
        for found in ranks:
            torch.testing.assert_close(found["curve losses"], alone["curve losses"], rtol=1e-5, atol=0)
            assert all(found[name].equal(ranks[0][name]) for name in found if name.startswith("curve "))
    losses = alone["curve losses"]
    assert losses[-4:].mean() < losses[:4].mean()


def test_two_machines_have_the_same_weights_and_the_losses_of_one(
    alone: Results, together: dict[int, list[Results]]
) -> None:
    first = together[4][0]
    for found in together[4]:
        torch.testing.assert_close(found["two machines, curve losses"], alone["curve losses"], rtol=1e-5, atol=0)
        names = [name for name in found if name.startswith("two machines, ")]
        assert len(names) > 10
        assert all(found[name].equal(first[name]) for name in names)


def shared_memory() -> set[str]:
    """Its files; semaphores there are of other programs."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_rank_is_noticed_and_nothing_stays_in_shared_memory(tmp_path: Path, world: int) -> None:
    before = shared_memory()
    with meeting_place(world) as environments, led([environments], learn_until_lost, tmp_path) as leader:
        deadline = time.monotonic() + PATIENCE_S
        while not all((tmp_path / f"steps-{rank}").exists() for rank in range(world)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        killed = time.time()
        os.kill(int((tmp_path / "process-1").read_text()), signal.SIGKILL)
        leader.join(PATIENCE_S)
    assert codes(tmp_path, world) == [3 if rank != 1 else -9 for rank in range(world)]
    for rank in set(range(world)) - {1}:
        noticed, _, told = (tmp_path / f"lost-{rank}").read_text().partition(" ")
        assert float(noticed) - killed < 30
        assert f"rank {rank} of {world} has lost the others" in told
    deadline = time.monotonic() + 10  # others on this machine may use some for a while
    while not shared_memory() <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_memory() <= before

"""Streamed training on several ranks is that of one: the same loss, gradients and weights, on any number of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from equipment.ranks import PATIENCE_S, exit_codes, meeting_place
from equipment.training import start_process
from penstock.train.ranks import Ranks
from train.streamed_ranks import all_checks, first_step, join, learn_until_lost, note_all_checks

pytestmark = pytest.mark.usefixtures("one_thread")
Results = dict[str, Tensor]


@pytest.fixture(scope="module")
def alone(one_thread: None) -> Results:
    """What one process finds."""
    return all_checks(Ranks())


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """What 2, 3 and 4 ranks find, rank by rank."""
    out, found = tmp_path_factory.mktemp("ranks"), {}
    for world in (2, 3, 4):
        with meeting_place(world) as environments:
            for environment in environments:
                del environment["LOCAL_WORLD_SIZE"]
            ranks = [start_process(join, environment, note_all_checks, out) for environment in environments]
            try:
                assert exit_codes(ranks) == [0] * world
            finally:
                for rank in ranks:
                    rank.kill()
        found[world] = [load_file(out / f"{world}-{rank}.safetensors") for rank in range(world)]
    return found


def distance(found: Results, kind: str, truth: Results) -> float:
    """Of all gradients together, by the norm of the truth."""
    names = [name.removeprefix("fp32 ") for name in truth if name.startswith("fp32 ") and name != "fp32 loss"]
    apart = torch.stack([(found[f"{kind} {name}"] - truth[f"fp32 {name}"]).norm() for name in names]).norm()
    return float(apart / torch.stack([truth[f"fp32 {name}"].norm() for name in names]).norm())


def test_four_ranks_with_a_sequence_each_make_the_first_step_of_one_with_four(
    alone: Results, together: dict[int, list[Results]]
) -> None:
    for found in together[4]:
        assert float(found["fp32 loss"]) == pytest.approx(float(alone["fp32 loss"]), rel=1.5e-9)
        for name in alone:
            if name.startswith("fp32 "):
                torch.testing.assert_close(found[name], alone[name], rtol=0, atol=2.5e-5)
    assert distance(together[4][0], "fp32", alone) < 2.5e-5, "of the norm, too"


def test_bf16_is_closer_to_fp32_than_standard_data_parallelism_is(
    alone: Results, together: dict[int, list[Results]]
) -> None:
    ranks = together[4][0]
    streamed = distance(ranks, "bf16", alone)
    assert streamed < distance(ranks, "ddp bf16", alone)


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
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_rank_is_noticed_and_nothing_stays_in_shared_memory(tmp_path: Path, world: int) -> None:
    before = shared_memory()
    with meeting_place(world) as environments:
        ranks = [start_process(join, environment, learn_until_lost, tmp_path) for environment in environments]
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not all((tmp_path / f"steps-{rank}").exists() for rank in range(world)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            killed = time.time()
            ranks[1].kill()
            codes = exit_codes(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    assert codes == [3 if rank != 1 else -9 for rank in range(world)]
    for rank in set(range(world)) - {1}:
        noticed, _, told = (tmp_path / f"lost-{rank}").read_text().partition(" ")
        assert float(noticed) - killed < 30
        assert f"rank {rank} of {world} has lost the others" in told
    assert shared_memory() <= before

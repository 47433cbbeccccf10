"""A checkpoint is whole or it is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.errors import CheckpointError
from penstock.storage import LocalStorage
from penstock.train.checkpoints import Checkpoints
from penstock.train.trainer import State

STATE: State = {
    "model.w": torch.arange(6.0).reshape(2, 3),
    "optimizer.0.exp_avg": torch.ones(2),
    "rng.torch": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(LocalStorage(tmp_path))


def test_what_is_written_is_read(checkpoints: Checkpoints) -> None:
    digest = checkpoints.write("00000007", STATE, {"total_steps": 7})
    found = checkpoints.read("00000007", digest)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_a_changed_byte_is_found(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    digest = checkpoints.write("00000007", STATE, {})
    file = tmp_path / "checkpoints" / "00000007" / name
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"{name} is damaged|its manifest differs"):
        checkpoints.read("00000007", digest)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_a_missing_file_makes_it_incomplete(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    digest = checkpoints.write("00000007", STATE, {})
    (tmp_path / "checkpoints" / "00000007" / name).unlink()
    with pytest.raises(CheckpointError, match="00000007 is incomplete"):
        checkpoints.read("00000007", digest)


def test_another_checkpoint_under_the_same_name_is_not_the_committed_one(checkpoints: Checkpoints) -> None:
    digest = checkpoints.write("00000007", STATE, {})
    checkpoints.write("00000007", {**STATE, "model.w": torch.zeros(2, 3)}, {})
    with pytest.raises(CheckpointError, match="not the one that was committed"):
        checkpoints.read("00000007", digest)


def test_all_but_the_kept_are_removed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for number in range(4):
        checkpoints.write(f"{number:08d}", STATE, {})
    checkpoints.remove_all_but({"00000001", "00000003"})
    assert checkpoints.ids() == ["00000001", "00000003"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000001", "00000003"]

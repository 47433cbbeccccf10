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


LARGE: State = {
    **{f"model.{number}": torch.full((16,), float(number)) for number in range(5)},
    "model.long": torch.arange(100.0),
    **{f"optimizer.{number}.exp_avg": torch.full((16,), -float(number)) for number in range(3)},
    "rng.torch": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.fixture
def in_parts(tmp_path: Path) -> Checkpoints:
    return Checkpoints(LocalStorage(tmp_path), file_bytes=130)


def test_a_large_state_is_several_files_each_of_which_is_small(in_parts: Checkpoints, tmp_path: Path) -> None:
    digest = in_parts.write("00000007", LARGE, {})
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "00000007").iterdir())
    models = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert names == ["checkpoint.json", *models, *(f"optimizer-0000{n}-of-00002.safetensors" for n in (1, 2))]
    parts = list(in_parts.parts("00000007", digest))
    assert [len(part) for part in parts] == [2, 2, 1, 1, 2, 2]
    found = in_parts.read("00000007", digest)
    assert found.keys() == LARGE.keys()
    assert all(torch.equal(found[name], LARGE[name]) for name in LARGE)


def test_weights_alone_are_read_without_the_rest(in_parts: Checkpoints, tmp_path: Path) -> None:
    digest = in_parts.write("00000007", LARGE, {})
    for path in (tmp_path / "checkpoints" / "00000007").glob("optimizer*"):
        path.unlink()
    found = in_parts.read("00000007", digest, only="model")
    assert found.keys() == {name for name in LARGE if name.startswith("model.")}


@pytest.mark.parametrize("name", ["model-00003-of-00004.safetensors", "optimizer-00002-of-00002.safetensors"])
def test_looking_through_finds_what_reading_would(in_parts: Checkpoints, tmp_path: Path, name: str) -> None:
    digest = in_parts.write("00000007", LARGE, {})
    in_parts.verify("00000007", digest)
    file = tmp_path / "checkpoints" / "00000007" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        in_parts.verify("00000007", digest)
    file.unlink()
    with pytest.raises(CheckpointError, match="00000007 is incomplete"):
        in_parts.verify("00000007", digest)


def test_what_one_size_of_files_wrote_another_reads(in_parts: Checkpoints, checkpoints: Checkpoints) -> None:
    assert checkpoints.read("1", in_parts.write("1", LARGE, {})).keys() == LARGE.keys()
    assert in_parts.read("2", checkpoints.write("2", LARGE, {})).keys() == LARGE.keys()

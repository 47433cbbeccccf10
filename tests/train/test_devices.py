"""Devices and precision, settled before anything is written. That there are CUDA devices is made believe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipment.training import counting_config
from penstock.errors import ConfigError
from penstock.train.config import TrainingConfig
from penstock.train.devices import choose_devices, choose_precision
from penstock.train.run import run_training


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def chosen(**settings: object) -> list[str]:
    config = TrainingConfig(dataset_file="x", **settings)  # pyright: ignore[reportArgumentType]
    config.check()
    return [str(device) for device in choose_devices(config)]


@pytest.mark.usefixtures("two_devices")
def test_a_worker_a_device_of_those_named_or_spread_over_all() -> None:
    assert chosen(cuda_ids="1,0", parallel_independent=True) == ["cuda:1", "cuda:0"]
    assert chosen(cuda_ids="1") == ["cuda:1"]
    assert chosen() == ["cuda:0"]
    assert chosen(parallel_independent=True, workers=3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert chosen(device="cuda:1", parallel_independent=True, workers=2) == ["cuda:1", "cuda:1"]
    assert chosen(device="cpu", parallel_independent=True, workers=2) == ["cpu", "cpu"]


@pytest.mark.usefixtures("two_devices")
def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"cuda_ids='0,2' names a CUDA device that is not there: torch sees 0, 1"):
        chosen(cuda_ids="0,2", parallel_independent=True)


@pytest.mark.usefixtures("no_devices")
def test_without_cuda_auto_is_the_cpu_and_nothing_else_is() -> None:
    assert chosen() == ["cpu"]
    for settings in ({"cuda_ids": "0"}, {"device": "cuda"}, {"device": "cuda:0"}):
        with pytest.raises(ConfigError, match="torch finds no CUDA device here; leave it away to train on the CPU"):
            chosen(**settings)


@pytest.mark.usefixtures("no_devices")
def test_a_missing_device_loses_nothing_of_a_run(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names a CUDA device that is not there"):
        run_training(counting_config(store, tmp_path / "run", cuda_ids="3"))
    assert not (tmp_path / "run").exists()
    run_training(counting_config(store, tmp_path / "run", steps=3))
    with pytest.raises(ConfigError, match="names a CUDA device that is not there"):
        run_training(counting_config(store, tmp_path / "run", device="cuda"))
    assert run_training(counting_config(store, tmp_path / "run")).reason == "epoch"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"cuda_ids": "0,1"}, "names several devices: use them with --parallel-independent, --ddp or --streamed"),
        ({"cuda_ids": "0,x"}, "is no list of devices"),
        ({"cuda_ids": "0,1", "parallel_independent": True, "workers": 3}, "workers=3 and cuda_ids='0,1' disagree"),
        ({"cuda_ids": "0", "device": "cpu"}, "exclude each other"),
        ({"device": "tpu"}, "device='tpu' is unknown"),
        ({"precision": "fp8"}, "precision='fp8' is unknown"),
    ],
)
def test_devices_that_make_no_sense_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        chosen(**settings)


@pytest.mark.usefixtures("two_devices")
def test_auto_precision_is_bf16_on_cuda_alone() -> None:
    assert choose_precision("auto", torch.device("cuda", 0)) == "bf16"
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    assert choose_precision("bf16", torch.device("cpu")) == "bf16"
    assert choose_precision("fp32", torch.device("cuda", 0)) == "fp32"


def test_the_precision_a_run_began_with_stays(store: Path, tmp_path: Path) -> None:
    run_training(counting_config(store, tmp_path / "run", model="tiny", precision="bf16", steps=2))
    run_training(counting_config(store, tmp_path / "run", model="tiny", steps=4))
    with pytest.raises(ConfigError, match="precision: got 'fp32', expected 'bf16'"):
        run_training(counting_config(store, tmp_path / "run", model="tiny", precision="fp32", steps=6))

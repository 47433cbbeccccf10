"""Which device a worker computes on, and in what precision: settled before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from penstock.errors import ConfigError
from penstock.train.checks import check_device
from penstock.train.config import TrainingConfig

Precision = Literal["fp32", "bf16"]


def choose_devices(config: TrainingConfig) -> list[torch.device]:
    """The device of each worker, in their order.

    With `cuda_ids` one worker a device; else `workers` of them on what `device` says, spread over all CUDA devices
    where it is ``auto`` or ``cuda`` and there are several.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.cuda_ids:
        return [_cuda(index, count, f"cuda_ids={config.cuda_ids!r}") for index in config.cuda_indices]
    if config.device == "cpu" or (config.device == "auto" and not count):
        return [torch.device("cpu")] * config.workers
    name, _, index = config.device.partition(":")
    if index:
        return [_cuda(int(index), count, f"device={config.device!r}")] * config.workers
    if not count:
        raise _not_there(f"device={name!r}", count)
    return [torch.device("cuda", worker % count) for worker in range(config.workers)]


def device_named(name: str) -> torch.device:
    """One device by its name, for whoever trains without a config; refused as `penstock train --device` refuses it."""
    check_device(name)
    return choose_devices(TrainingConfig(dataset_file="", device=name))[0]


def device_of_rank(config: TrainingConfig, local_rank: int) -> torch.device:
    """The device of one rank, by its number among those of its machine."""
    devices = choose_devices(config if config.cuda_ids else replace(config, workers=local_rank + 1))
    if local_rank >= len(devices):
        raise ConfigError(
            f"cuda_ids={config.cuda_ids!r} names {len(devices)} devices, and this is rank {local_rank} of its machine: "
            "start one rank a device"
        )
    return devices[local_rank]


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """``auto`` is bf16 on CUDA devices that compute in it, and fp32 elsewhere."""
    if wanted == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if wanted == "bf16" else "fp32"


def _cuda(index: int, count: int, setting: str) -> torch.device:
    if index >= count:
        raise _not_there(setting, count)
    return torch.device("cuda", index)


def _not_there(setting: str, count: int) -> ConfigError:
    here = "torch finds no CUDA device here; leave it away to train on the CPU"
    if count:
        here = f"torch sees {', '.join(map(str, range(count)))}; name one of those, or leave it away"
    return ConfigError(f"{setting} names a CUDA device that is not there: {here}")

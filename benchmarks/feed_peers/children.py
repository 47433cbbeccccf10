"""The peers, and the environment of their own that they have."""

from __future__ import annotations

import subprocess
from pathlib import Path

from measuring import set_up

CONTENDER = Path(__file__).with_name("contender.py")
PEER_PACKAGES = [
    "mosaicml-streaming",
    "litdata",
    "datasets",
    "grain",
    "webdataset",
    "torchdata",
    "tokenizers",
    "numpy<2.3",
    "torch==2.13.0",  # a plain torch would bring gigabytes of CUDA along
]
PEERS = ("torchdata", "litdata", "grain", "hf", "webdataset", "mosaic")


def set_up_peers(folder: Path) -> None:
    pip = set_up(folder, PEER_PACKAGES)
    # One that does not go with torch for the CPU would fail the libraries that look for it.
    subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)
